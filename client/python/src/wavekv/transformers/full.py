"""Up to how many tokens a batch is attended exactly in the model's process: `full_attention`."""

from __future__ import annotations

import torch

from wavekv.choice import full_attention_tokens_max
from wavekv.errors import InvalidArgumentError
from wavekv.transformers.resident import device_memory, on_gpu
from wavekv.types import ModelShape

# Of a GPU's memory, what "auto" may hold of keys and values: one part in so many.
_MEMORY_SHARE = 4


class FullAttention:
    """What WaveKVCache(full_attention=) was given: a count of tokens, "never", or "auto"."""

    def __init__(self, asked: str | int) -> None:
        """Raises InvalidArgumentError for anything else."""
        if asked not in ("auto", "never") and (type(asked) is not int or asked < 0):
            raise InvalidArgumentError(
                f"full_attention is {asked!r}, expected 'auto', 'never' or a count of tokens"
            )
        self._asked = asked

    @property
    def never(self) -> bool:
        """Whether nothing is ever attended here."""
        return self._asked in ("never", 0)

    def columns_max(self, shape: ModelShape, keys: torch.Tensor, tokens_max: int) -> int:
        """Returns up to how many columns a batch is attended exactly where it is made.

        keys [batch, kv_heads, n, dim]: of a pass. tokens_max: that a row may ever get. "auto" is none
        on the CPU, and on a GPU as many as exact attention is faster for, but no more than a quarter
        of its memory holds.
        """
        if isinstance(self._asked, int):
            return min(self._asked, tokens_max)
        if self._asked == "never" or not on_gpu(keys):
            return 0
        batch, heads, _, dim = keys.shape
        column_bytes = 2 * shape.layers * batch * heads * dim * keys.element_size()
        held_max = device_memory(keys) // _MEMORY_SHARE // column_bytes
        return full_attention_tokens_max(shape, batch, min(tokens_max, held_max))
