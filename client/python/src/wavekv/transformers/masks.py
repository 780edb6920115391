"""The mask of the attention "wavekv", and what one says about the rows of a batch: how much padding
each has at its left."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention.bias import CausalBias, causal_lower_right
from transformers.masking_utils import causal_mask_function, sdpa_mask

from wavekv.transformers.models import UnsupportedModelError


def wavekv_mask(**asked: Any) -> torch.Tensor | None:
    """Makes the mask of a pass, as transformers' AttentionMaskInterface asks for it.

    It is that of "sdpa", but where there is no padding. A pass of one token has none then: sdpa has
    one while a CUDA graph is captured. And a chunk of a prompt, for which sdpa's has an entry for each
    pair of a query and a key, gets PyTorch's CausalBias, which has none, and which its fastest kernels
    know. transformers 4.57 says where the chunk begins in a tensor alone, and gets the mask.
    """
    columns, new_columns = asked["kv_length"], asked.get("q_length")
    padding = asked.get("attention_mask")
    if new_columns is None:
        new_columns = asked["cache_position"].shape[0]
    causal = (
        asked.get("kv_offset", 0) == 0
        and asked.get("local_size") is None
        and asked.get("allow_is_causal_skip", True)
        and asked.get("mask_function") is causal_mask_function
    )
    if causal and new_columns == 1 and padding is None:
        return None
    if (
        causal
        and type(asked.get("q_offset")) is int
        and asked["q_offset"] + new_columns == columns
        and 1 < new_columns < columns
        and (padding is None or (padding.shape[-1] == columns and bool(padding.all())))
    ):
        return causal_lower_right(new_columns, columns)
    return sdpa_mask(**asked)


def first_columns(
    mask: torch.Tensor | None, batch: int, new_tokens: int, columns: int
) -> list[int]:
    """Returns, for each row of the batch, the first column that is a token and not padding.

    mask: None or a CausalBias (everything earlier is attended), or [batch or 1, 1, new_tokens,
    columns], bool (True is attended) or additive float. columns counts all tokens so far, the new ones included.

    A row of padding only begins at `columns`. Raises UnsupportedModelError for a mask that is
    anything else than causal with padding at the left.
    """
    if mask is None or isinstance(mask, CausalBias):
        return [0] * batch
    if mask.ndim != 4 or mask.shape[1:] != (1, new_tokens, columns):
        raise UnsupportedModelError(
            f"attention mask of shape {tuple(mask.shape)}, expected "
            f"({batch}, 1, {new_tokens}, {columns}): one for all heads"
        )
    visible = _visible(mask).expand(batch, -1, -1, -1)[:, 0]
    last = visible[:, -1]
    first = torch.where(last.any(-1), last.int().argmax(-1), columns)
    column = torch.arange(columns, device=mask.device)
    # Query i is column `columns - new_tokens + i`. What padding attends to is nobody's business.
    query = torch.arange(columns - new_tokens, columns, device=mask.device)
    expected = (column >= first[:, None, None]) & (column <= query[:, None])
    is_token = query >= first[:, None]
    if not torch.equal(visible & is_token[..., None], expected & is_token[..., None]):
        raise UnsupportedModelError(
            "attention mask with holes: WaveKV serves causal attention with padding at the left "
            "(padding_side='left'), neither padding at the right nor masks of one's own"
        )
    return first.tolist()


def _visible(mask: torch.Tensor) -> torch.Tensor:
    if mask.dtype == torch.bool:
        return mask
    visible = mask == 0
    # Half of the smallest float16: whatever is added as "minus infinity" is far below.
    if not torch.all(visible | (mask <= -32752)):
        raise UnsupportedModelError(
            "attention mask that adds a bias to the logits: WaveKV knows attended and not attended"
        )
    return visible
