"""WaveKV inside Hugging Face transformers, without a patch to either.

    import wavekv.transformers

    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="wavekv")
    cache = wavekv.transformers.WaveKVCache(model.config, "unix:/run/wavekv/wavekvd.sock")
    model.generate(**inputs, past_key_values=cache, max_new_tokens=64)

The import registers the attention "wavekv" and its mask. A prompt is attended exactly, in this
process, and its keys and values go to the daemon as they are made; from the first generated token
on the daemon attends. Without a WaveKVCache the attention "wavekv" is "sdpa".

Needs `pip install 'wavekv[transformers]'`: transformers 4.57 or later, 5.x included.
"""

from transformers import AttentionInterface, AttentionMaskInterface

from wavekv.transformers.attention import wavekv_attention
from wavekv.transformers.cache import WaveKVCache
from wavekv.transformers.captured import CapturedPass
from wavekv.transformers.masks import wavekv_mask
from wavekv.transformers.models import SUPPORTED_MODELS, UnsupportedModelError, model_shape

ATTENTION = "wavekv"

AttentionInterface.register(ATTENTION, wavekv_attention)
# Without a mask of the same name transformers passes none, and padding is silently attended.
AttentionMaskInterface.register(ATTENTION, wavekv_mask)

__all__ = [
    "ATTENTION",
    "CapturedPass",
    "SUPPORTED_MODELS",
    "UnsupportedModelError",
    "WaveKVCache",
    "model_shape",
    "wavekv_attention",
]
