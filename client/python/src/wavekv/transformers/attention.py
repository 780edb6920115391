"""The attention function "wavekv" of transformers' AttentionInterface."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import CausalBias
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward

from wavekv.transformers.cache import check_dropped
from wavekv.transformers.models import UnsupportedModelError
from wavekv.transformers.states import NOT_COMPILED, NewStates

# Arguments of transformers' attention functions that change its arithmetic, by what they are.
_UNKNOWN_ARITHMETIC = {
    "softcap": "a soft cap of the logits",
    "sliding_window": "a sliding window",
    "position_bias": "a position bias",
    "s_aux": "attention sinks",
}

# Kernels for a token over a context that grows with each. cuDNN's, which torch may prefer, is planned
# anew for each length, on the host.
_TOKEN_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@torch.compiler.disable(reason=NOT_COMPILED)
def wavekv_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attends as transformers asks: through WaveKV for a WaveKVCache, with "sdpa" for any other.

    query [batch, query_heads, n, dim]; key and value as the cache's update returned them. Returns
    [batch, n, query_heads, value_dim] and no weights.

    Raises UnsupportedModelError for what WaveKV does not compute, and WaveKVError when the daemon
    fails, within the session's deadline.
    """

    def exact(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if isinstance(attention_mask, CausalBias):
            return _attend_tail(query, keys, values, attention_mask, dropout, scaling).transpose(1, 2)
        return sdpa_attention_forward(
            module, query, keys, values, attention_mask, dropout, scaling, **kwargs
        )[0]

    if not isinstance(key, NewStates) or not isinstance(value, NewStates):
        check_dropped(module.config, key.shape[2], kwargs.get("position_ids"))
        return exact(key, value), None
    for name, what in _UNKNOWN_ARITHMETIC.items():
        if kwargs.get(name) is not None:
            raise UnsupportedModelError(
                f"layer {key.layer} has {what} ({name}): WaveKV does not compute it"
            )
    if kwargs.get("output_attentions"):
        raise UnsupportedModelError("output_attentions=True: WaveKV returns no attention weights")
    if dropout:
        raise UnsupportedModelError(f"attention dropout of {dropout}: call model.eval() first")
    keys, values = key.unwrap(), value.unwrap()

    def here(keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if query.shape[2] > 1:
            return exact(keys, values)
        return _attend_token(query, keys, values, attention_mask, scaling).transpose(1, 2)

    return key.store.attend(key.layer, query, keys, values, attention_mask, scaling, here), None


def _attend_tail(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: CausalBias,
    dropout: float,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of the newest tokens over all: query [batch, query_heads, n, dim], keys and values
    [batch, kv_heads, columns, dim]. Returns [batch, query_heads, n, value_dim]."""
    group = query.shape[1] // keys.shape[1]
    # The flash kernel reads a key once for its group of queries; the others want a copy for each,
    # and without it fall back to one that holds all logits.
    shared = query.is_cuda and query.dtype in (torch.float16, torch.bfloat16)
    if not shared:
        keys, values = repeat_kv(keys, group), repeat_kv(values, group)
    return torch.nn.functional.scaled_dot_product_attention(
        query, keys, values, mask, dropout, scale=scaling, enable_gqa=shared and group > 1
    )


def _attend_token(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    mask: torch.Tensor | None,
    scaling: float | None,
) -> torch.Tensor:
    """Attention of one token over all, each key read once for all of its query heads, which stand in
    the place of several tokens: query [batch, query_heads, 1, dim], keys and values [batch, kv_heads,
    columns, dim], mask [batch, 1, 1, columns]. Returns [batch, query_heads, 1, value_dim]."""
    batch, heads, _, dim = query.shape
    grouped = query.reshape(batch, keys.shape[1], -1, dim)
    with sdpa_kernel(_TOKEN_KERNELS):
        out = torch.nn.functional.scaled_dot_product_attention(
            grouped, keys, values, mask, scale=scaling
        )
    return out.reshape(batch, heads, 1, -1)
