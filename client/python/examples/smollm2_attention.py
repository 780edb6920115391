"""Attention for the SmolLM2 example: the protocols a backend fulfils, and exact attention on numpy.

Keys and queries are post-RoPE everywhere. Query head i reads KV head i // group, where group is
n_q_heads / n_kv_heads. Logits are scaled by 1 / sqrt(head_dim).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

F32 = NDArray[np.float32]

# Keys per tile of scores. A tile of one KV head is [group * n_queries, KEY_TILE] float32, about
# 3 MB for a chunk of 512 queries: wide enough for the matrix product, small enough for a cache.
KEY_TILE = 512

# The same around the diagonal, where on average half of a tile's corner is masked and wasted.
DIAGONAL_TILE = 128

# Tokens per partial product of weights and values in a step of one token.
STEP_TILE = 1024


class StepAttention(Protocol):
    """Attention of one new token, for one layer: appends its key and value, then attends.

    The model calls it once per layer, in layer order, for consecutive token positions. The backend
    holds the sequence: everything prefilled into it plus what earlier calls appended. The new
    token sees itself.
    """

    def __call__(self, layer: int, q: F32, k: F32, v: F32) -> F32:
        """Appends (k, v) and returns the attention output.

        Args:
          layer: 0 .. n_layers - 1.
          q: queries [n_q_heads, head_dim] float32, after RoPE, not scaled.
          k: key of the new token [n_kv_heads, head_dim] float32, after RoPE.
          v: value of the new token [n_kv_heads, head_dim] float32.

        Returns:
          Output [n_q_heads, head_dim] float32. The arguments are row-major and valid during the
          call only: copy what must last.
        """
        ...


class KvSink(Protocol):
    """Receives keys and values during a prefill, for example to insert them into WaveKV.

    Called once per layer and chunk; for each layer, chunks come in order of position and are
    consecutive. The arrays belong to the model and are valid during the call only.
    """

    def __call__(self, layer: int, k: F32, v: F32) -> None:
        """Takes k and v [n_tokens, n_kv_heads, head_dim] float32, row-major, keys after RoPE."""
        ...


class ExactAttention:
    """Exact float32 attention over every token of one sequence; a StepAttention.

    Owns the sequence's keys and values for all layers, [n_kv_heads, max_tokens, head_dim] float32
    per layer, so that a head's keys are one contiguous matrix. Not thread-safe.
    """

    def __init__(
        self, n_layers: int, n_q_heads: int, n_kv_heads: int, head_dim: int, max_tokens: int
    ) -> None:
        if n_q_heads % n_kv_heads != 0:
            raise ValueError(f"{n_q_heads} query heads do not divide among {n_kv_heads} KV heads")
        self.n_kv_heads = n_kv_heads
        self.group = n_q_heads // n_kv_heads
        self.head_dim = head_dim
        self.max_tokens = max_tokens
        self._scale = np.float32(head_dim**-0.5)
        shape = (n_layers, n_kv_heads, max_tokens, head_dim)
        # np.empty: pages are only touched as tokens arrive.
        self._k = np.empty(shape, np.float32)
        self._v = np.empty(shape, np.float32)
        self._n_tokens = [0] * n_layers

    def n_tokens(self, layer: int) -> int:
        """Tokens held for one layer."""
        return self._n_tokens[layer]

    def append(self, layer: int, k: F32, v: F32) -> None:
        """Appends k and v [n_tokens, n_kv_heads, head_dim] float32 of consecutive tokens."""
        begin = self._n_tokens[layer]
        end = begin + k.shape[0]
        if end > self.max_tokens:
            raise ValueError(f"layer {layer}: {end} tokens, room for {self.max_tokens}")
        self._k[layer, :, begin:end] = k.swapaxes(0, 1)
        self._v[layer, :, begin:end] = v.swapaxes(0, 1)
        self._n_tokens[layer] = end

    def keys(self, layer: int) -> F32:
        """Keys held for one layer [n_tokens, n_kv_heads, head_dim]: a view, not contiguous."""
        return self._k[layer, :, : self._n_tokens[layer]].swapaxes(0, 1)

    def values(self, layer: int) -> F32:
        """Values held for one layer [n_tokens, n_kv_heads, head_dim]: a view, not contiguous."""
        return self._v[layer, :, : self._n_tokens[layer]].swapaxes(0, 1)

    def truncate(self, n_tokens: int) -> None:
        """Forgets every token from position n_tokens on, in all layers."""
        self._n_tokens = [min(n, n_tokens) for n in self._n_tokens]

    def __call__(self, layer: int, q: F32, k: F32, v: F32) -> F32:
        """One token: see StepAttention."""
        self.append(layer, k[None], v[None])
        n = self._n_tokens[layer]
        grouped = (q * self._scale).reshape(self.n_kv_heads, self.group, self.head_dim)
        out = np.empty_like(grouped)
        for head in range(self.n_kv_heads):
            out[head] = _attend_one(
                grouped[head], self._k[layer, head, :n], self._v[layer, head, :n]
            )
        return out.reshape(q.shape)

    def block(self, layer: int, q: F32, k: F32, v: F32) -> F32:
        """A block of consecutive new tokens at once: appends them, then attends causally.

        Args:
          layer: 0 .. n_layers - 1.
          q: queries [n, n_q_heads, head_dim] float32, after RoPE, not scaled.
          k: keys [n, n_kv_heads, head_dim] float32, after RoPE.
          v: values [n, n_kv_heads, head_dim] float32.

        Returns:
          Output [n, n_q_heads, head_dim] float32; token i sees all earlier tokens and itself.
        """
        n = q.shape[0]
        n_past = self._n_tokens[layer]
        self.append(layer, k, v)
        if n == 0:
            return np.empty_like(q)
        out = np.empty((n, self.n_kv_heads, self.group, self.head_dim), np.float32)
        grouped = (q * self._scale).reshape(out.shape)
        for head in range(self.n_kv_heads):
            rows = np.ascontiguousarray(grouped[:, head]).reshape(n * self.group, self.head_dim)
            result = _causal(rows, self._k[layer, head], self._v[layer, head], n_past, self.group)
            out[:, head] = result.reshape(n, self.group, self.head_dim)
        return out.reshape(q.shape)


def _attend_one(q: F32, keys: F32, values: F32) -> F32:
    """Attention of one token's scaled queries [group, head_dim] over [n, head_dim] keys, values.

    Written for the shapes that BLAS is quick at with so few queries: keys times queries, copied to
    the transpose, and values in tiles. Measured on 2 cores: a token after 7,112 takes 45 ms, where
    one np.matmul over all heads made it 63.
    """
    scores = np.ascontiguousarray((keys @ q.T).T)
    scores -= scores.max(axis=1, keepdims=True)
    np.exp(scores, out=scores)
    out = np.zeros_like(q)
    for begin in range(0, keys.shape[0], STEP_TILE):
        end = min(begin + STEP_TILE, keys.shape[0])
        out += scores[:, begin:end] @ values[begin:end]
    out /= scores.sum(axis=1, keepdims=True)
    return out


def _causal(q: F32, keys: F32, values: F32, n_past: int, group: int) -> F32:
    """Causal attention of one KV head, tile by tile.

    Args:
      q: scaled queries [n * group, head_dim], the query heads of a token adjacent.
      keys, values: [>= n_past + n, head_dim]; token i of the block is at position n_past + i.
      n_past: tokens before the block, visible to every query.
      group: query heads per token.

    Returns:
      Output [n * group, head_dim].
    """
    n = q.shape[0] // group
    softmax = _OnlineSoftmax(q)
    for begin in range(0, n_past, KEY_TILE):
        end = min(begin + KEY_TILE, n_past)
        softmax.visit(keys[begin:end], values[begin:end])
    # Around the diagonal narrow tiles: a token before the tile sees none of it and is left out.
    for begin in range(0, n, DIAGONAL_TILE):
        end = min(begin + DIAGONAL_TILE, n)
        token = np.repeat(np.arange(begin, n), group)
        hidden = np.arange(begin, end) > token[:, None]
        tile = slice(n_past + begin, n_past + end)
        softmax.visit(keys[tile], values[tile], begin * group, hidden)
    return softmax.out / softmax.mass[:, None]


class _OnlineSoftmax:
    """Attention of a set of queries [n_rows, head_dim] over keys that come in tiles.

    Keeps, per query, the largest logit so far and the sums relative to it (Milakov and Gimelshein,
    arXiv 1805.02867), so that no more than one tile of scores exists at a time.

    Attributes:
      out: sum of exp(logit - peak) * value [n_rows, head_dim].
      mass: sum of exp(logit - peak) [n_rows].
    """

    def __init__(self, q: F32) -> None:
        n_rows = q.shape[0]
        self.out = np.zeros(q.shape, np.float32)
        self.mass = np.zeros(n_rows, np.float32)
        self._q = q
        self._peak = np.full(n_rows, -np.inf, np.float32)
        self._scores = np.empty(n_rows * KEY_TILE, np.float32)

    def visit(
        self, keys: F32, values: F32, first_row: int = 0, hidden: NDArray[np.bool_] | None = None
    ) -> None:
        """Adds a tile of at most KEY_TILE keys, for the queries from first_row on.

        Args:
          keys, values: [n_keys, head_dim].
          first_row: queries before it see none of the tile.
          hidden: [n_rows - first_row, n_keys], true where a query must not see a key. Every query
            sees at least one key of the tile. None hides nothing.
        """
        q, peak = self._q[first_row:], self._peak[first_row:]
        scores = self._scores[: q.shape[0] * keys.shape[0]].reshape(q.shape[0], keys.shape[0])
        np.matmul(q, keys.T, out=scores)
        if hidden is not None:
            scores[hidden] = -np.inf
        new_peak = np.maximum(peak, scores.max(axis=1))
        scores -= new_peak[:, None]
        np.exp(scores, out=scores)
        decay = np.exp(peak - new_peak)
        # The sum as a product with ones: BLAS is several times faster at it than np.sum.
        self.mass[first_row:] *= decay
        self.mass[first_row:] += scores @ np.ones(keys.shape[0], np.float32)
        self.out[first_row:] *= decay[:, None]
        self.out[first_row:] += scores @ values
        self._peak[first_row:] = new_peak
