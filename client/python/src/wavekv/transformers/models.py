"""Which models can be served, by their config; the others are refused by name, before any work."""

from __future__ import annotations

from typing import Any

import torch

from wavekv.errors import InvalidArgumentError
from wavekv.types import ModelShape

# Families whose attention is plain softmax over all earlier tokens, with keys rotated before the
# cache sees them. Each is compared with "sdpa" in tests/python/test_transformers_models.py.
SUPPORTED_MODELS = ("llama", "mistral", "phi", "phi3", "qwen2", "qwen3", "smollm3")

_DTYPES = {torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16"}


class UnsupportedModelError(InvalidArgumentError):
    """A model, or a use of one, that WaveKV cannot serve; the text names what stands in the way."""


def dtype_name(dtype: torch.dtype) -> str:
    """Returns WaveKV's name of a torch dtype; UnsupportedModelError if it has none."""
    if dtype not in _DTYPES:
        expected = ", ".join(str(known) for known in _DTYPES)
        raise UnsupportedModelError(f"keys and values of {dtype}: WaveKV stores {expected}")
    return _DTYPES[dtype]


def model_shape(config: Any, dtype: torch.dtype | None = None) -> ModelShape:
    """Returns the attention geometry of the model of `config`, a transformers config.

    dtype: of its keys and values; the config's own (or float32) by default.

    Raises UnsupportedModelError for model families other than SUPPORTED_MODELS, and for layers with
    a sliding window, latent attention (MLA), or a soft cap of the logits.
    """
    text = config.get_text_config(decoder=True)
    _refuse_unservable(text)
    query_heads = text.num_attention_heads
    head_dim = getattr(text, "head_dim", None) or text.hidden_size // query_heads
    return ModelShape(
        layers=text.num_hidden_layers,
        query_heads=query_heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or query_heads,
        key_dim=head_dim,
        dtype=dtype_name(dtype or getattr(text, "dtype", None) or torch.float32),
        model_id=(getattr(text, "_name_or_path", "") or text.model_type)[-256:],
    )


def switch_tokens(config: Any) -> int | None:
    """Returns the length beyond which Phi-3's longrope rotates by other factors; None without one.

    When a generation passes it, transformers drops whatever cache there is and reads all tokens
    again, into a cache of its own.
    """
    text = config.get_text_config(decoder=True)
    rope = getattr(text, "rope_parameters", None) or getattr(text, "rope_scaling", None) or {}
    if text.model_type != "phi3" or rope.get("rope_type", rope.get("type")) != "longrope":
        return None
    return text.original_max_position_embeddings


def _refuse_unservable(text: Any) -> None:
    name = text.model_type
    if getattr(text, "kv_lora_rank", None):
        raise UnsupportedModelError(
            f"model {name!r} has multi-head latent attention (kv_lora_rank={text.kv_lora_rank}): "
            "WaveKV stores the keys and values of each head"
        )
    for field in ("attn_logit_softcapping", "attention_logit_softcapping", "attn_logit_softcap"):
        if getattr(text, field, None):
            raise UnsupportedModelError(
                f"model {name!r} caps its attention logits ({field}={getattr(text, field)}): "
                "WaveKV does not"
            )
    sliding = [
        layer
        for layer, kind in enumerate(getattr(text, "layer_types", None) or ())
        if kind != "full_attention"
    ]
    if sliding:
        kinds = sorted({text.layer_types[layer] for layer in sliding})
        raise UnsupportedModelError(
            f"model {name!r} has layers of kind {', '.join(kinds)} (the first is layer "
            f"{sliding[0]}): WaveKV serves full attention"
        )
    if getattr(text, "sliding_window", None) and getattr(text, "use_sliding_window", True):
        raise UnsupportedModelError(
            f"model {name!r} has a sliding window (sliding_window={text.sliding_window}): WaveKV "
            "serves full attention"
        )
    if name not in SUPPORTED_MODELS:
        raise UnsupportedModelError(
            f"model {name!r} is not among those that are known to work: "
            f"{', '.join(SUPPORTED_MODELS)}"
        )
