"""Which attention is faster on a GPU: exact attention over its own memory, or WaveKV's resident path."""

from __future__ import annotations

import dataclasses

from wavekv import _core
from wavekv.types import ModelShape

# What the model was fitted to: an NVIDIA H200 on PCIe 5 x16, and a block cache of 5 %.
HBM_BYTES_PER_S: float = _core.HBM_BYTES_PER_S
BUS_BYTES_PER_S: float = _core.BUS_BYTES_PER_S
HIT_RATIO: float = _core.HIT_RATIO


@dataclasses.dataclass(frozen=True)
class AttentionCost:
    """Microseconds that a step of one layer takes, estimated.

    full_us: exact attention over keys and values in the GPU's memory. wave_us: the resident path
    (wavekv.gpu), keys and values in host memory, with the default budget.
    """

    full_us: float
    wave_us: float

    @property
    def full_wins(self) -> bool:
        return self.full_us < self.wave_us


def estimate_attention(
    shape: ModelShape,
    batch: int,
    tokens: int,
    *,
    hit_ratio: float = HIT_RATIO,
    hbm_bytes_per_s: float = HBM_BYTES_PER_S,
    bus_bytes_per_s: float = BUS_BYTES_PER_S,
) -> AttentionCost:
    """Estimates both sides of a layer's step: C++ client/gpu/attention_choice.h says how.

    tokens: of each of `batch` sequences. hit_ratio: blocks that the block cache has. hbm_bytes_per_s:
    what full attention reads over long contexts; bus_bytes_per_s: what kernels read of host memory.
    Needs no GPU. Raises InvalidArgumentError for a count of 0, a hit ratio outside 0 to 1, or a rate
    that is not positive.
    """
    cost = _core.estimate_attention(
        shape._to_core(), batch, tokens, hit_ratio, hbm_bytes_per_s, bus_bytes_per_s
    )
    return AttentionCost(**cost)


def full_attention_tokens_max(
    shape: ModelShape,
    batch: int,
    tokens_max: int,
    *,
    hit_ratio: float = HIT_RATIO,
    hbm_bytes_per_s: float = HBM_BYTES_PER_S,
    bus_bytes_per_s: float = BUS_BYTES_PER_S,
) -> int:
    """Returns the most tokens, tokens_max or a multiple of 1,024 below it, up to which full attention
    wins. Arguments and errors as estimate_attention; more than 2^32 tokens are refused, too."""
    return _core.full_attention_tokens_max(
        shape._to_core(), batch, tokens_max, hit_ratio, hbm_bytes_per_s, bus_bytes_per_s
    )
