"""Exact attention at its best: keys and values of fixed length, and sdpa over all of them.

transformers' own "sdpa" makes a mask for a token whenever a CUDA graph is captured, and for a mask a
copy of the keys and values for each query head. "sdpa_whole" is registered here beside it: a pass of
one token has no mask and reads each key once for all of its query heads, as full_attention.py does.
It is right for a cache of which all columns are attended, and for no other.
"""

from __future__ import annotations

import gc
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.cache_utils import Cache, CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

ATTENTION = "sdpa_whole"


class WholeLayer(CacheLayerMixin):
    """Keys and values of fixed length whose last column is the newest token's.

    Nothing is masked and nothing grows: at least as fast as any static cache can be. A token takes
    the place of the one before.
    """

    is_sliding = False
    is_compileable = False

    def __init__(self, shape: tuple[int, ...], like: torch.Tensor) -> None:
        super().__init__()
        self.keys, self.values = (like.new_zeros(shape) for _ in range(2))
        for states in (self.keys, self.values):  # As a static cache says it to torch.compile.
            torch._dynamo.mark_static_address(states)
        self.is_initialized = True

    def lazy_initialization(self, *states: torch.Tensor) -> None:
        """Nothing to do."""

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.keys[:, :, -1:].copy_(key_states)
        self.values[:, :, -1:].copy_(value_states)
        return self.keys, self.values

    def get_mask_sizes(self, query: Any) -> tuple[int, int]:
        return self.keys.shape[2], 0

    def get_seq_length(self) -> int:
        return self.keys.shape[2] - 1

    def get_max_length(self) -> int:
        return self.keys.shape[2]

    def get_max_cache_shape(self) -> int:
        return self.keys.shape[2]


def prefilled(model: Any, prompt: torch.Tensor) -> tuple[Cache, torch.Tensor]:
    """Reads the prompt [batch, tokens] with the model's attention, a row at a time for its memory.

    Returns a cache of WholeLayers with a column more, and the logits of the last tokens
    [batch, vocabulary].
    """
    batch, tokens = prompt.shape
    layers: list[WholeLayer] = []
    logits = []
    for row in range(batch):
        cache = DynamicCache(config=model.config)
        logits.append(
            model(prompt[row : row + 1], past_key_values=cache, logits_to_keep=1).logits[:, -1]
        )
        for i, layer in enumerate(cache.layers):
            if row == 0:
                _, heads, _, dim = layer.keys.shape
                layers.append(WholeLayer((batch, heads, tokens + 1, dim), layer.keys))
            layers[i].keys[row, :, :tokens] = layer.keys[0]
            layers[i].values[row, :, :tokens] = layer.values[0]
        del cache
        free()
    return Cache(layers=layers), torch.cat(logits)


def free() -> None:
    """Gives back the memory on the device that nothing holds."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    if query.shape[2] > 1 or attention_mask is not None:
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, **kwargs
        )
    out = torch.nn.functional.scaled_dot_product_attention(
        query, key, value, scale=scaling, enable_gqa=True
    )
    return out.transpose(1, 2), None


def _mask(**asked: Any) -> torch.Tensor | None:
    whole = asked["q_length"] == 1 and asked.get("attention_mask") is None
    return None if whole else sdpa_mask(**asked)


AttentionInterface.register(ATTENTION, _attention)
AttentionMaskInterface.register(ATTENTION, _mask)
