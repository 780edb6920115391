"""The sides that transformers_speed.py compares: one model, its keys and values in different caches."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
import time
from collections.abc import Callable
from typing import Any

import block_caches
import decode_clock
import torch
import whole_cache
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache
from wavekv.transformers import WaveKVCache

# Steps of what copies gigabytes: they take as long every time.
SLOW_STEPS = 5


class Inputs:
    """The token of each row and its position, [batch, 1]: tensors that a graph may hold.

    Two of the same arguments ask the same. The first token, until something changes it, is the
    prompt's last one once more, at the next position.
    """

    def __init__(self, prompt: torch.Tensor, vocabulary: int, changes: int, seed: int) -> None:
        """changes: how many tokens are made, before they come again."""
        self.prompt = prompt
        self.token = prompt[:, -1:].clone()
        self.position = torch.full_like(self.token, prompt.shape[1])
        shape = (changes, len(prompt), 1)
        generator = torch.Generator().manual_seed(seed)
        self._tokens = torch.randint(0, vocabulary, shape, generator=generator).to(prompt.device)
        self._changes = 0

    def change(self) -> None:
        """Another token at another position, as long as there are."""
        self._set(self._changes)
        self._changes += 1

    def cycle(self, queries: int) -> Callable[[int], None]:
        """Returns what sets the inputs before step i: one of `queries` pairs of tokens and positions
        after the other, again and again; 0: always another."""
        return (lambda i: self._set(i % queries)) if queries else lambda i: self.change()

    def _set(self, number: int) -> None:
        self.token.copy_(self._tokens[number % len(self._tokens)])
        self.position.fill_(self.prompt.shape[1] + 1 + number)


@dataclasses.dataclass(frozen=True)
class Series:
    """What WaveKV is asked in its series.

    Attributes:
      queries: a series each, see Inputs.cycle.
      warm_steps, warm_seconds: at most, before a series is timed.
    """

    queries: list[int]
    warm_steps: int
    warm_seconds: float


@dataclasses.dataclass(frozen=True)
class Decoding:
    """How a model decodes.

    Attributes:
      model, inputs: what is asked.
      steps: to be timed.
    """

    model: Any
    inputs: Inputs
    steps: int

    def call(self, cache: Any) -> torch.Tensor:
        """One pass; returns the logits of its token, [batch, vocabulary]."""
        logits = self.model(
            self.inputs.token, position_ids=self.inputs.position, past_key_values=cache
        ).logits[:, -1]
        logits.argmax(-1)  # A decoder chooses a token.
        return logits

    def measured(self, step: decode_clock.Step, steps: int, queries: int = 0) -> dict[str, Any]:
        """Times steps after a few for warming up; adds tokens_per_s, from the mean of the steps."""
        before = self.inputs.cycle(queries)
        for i in range(decode_clock.WARM_UP_STEPS):
            before(i)
            step()
        result: dict[str, Any] = decode_clock.timed(step, steps, before)
        result["tokens_per_s"] = round(1e3 * len(self.inputs.token) / result["wall_ms_mean"], 1)
        return result


@dataclasses.dataclass(frozen=True)
class FirstLogits:
    """What both sides say to the same: the prompt's last token, and the first one after it.

    Attributes:
      prompt, token: [batch, vocabulary].
    """

    prompt: torch.Tensor
    token: torch.Tensor


def sdpa_sides(decoding: Decoding, compiled: bool) -> tuple[dict[str, Any], FirstLogits]:
    """Exact attention; returns what was measured, and the logits by transformers' own "sdpa"."""
    model, prompt = decoding.model, decoding.inputs.prompt
    result: dict[str, Any] = {}
    model.set_attn_implementation("sdpa")
    started = time.perf_counter()
    whole, prompt_logits = whole_cache.prefilled(model, prompt)
    decode_clock.wait()
    result["prefill_s"] = round(time.perf_counter() - started, 2)
    result["kv_bytes"] = sum(layer.keys.nbytes + layer.values.nbytes for layer in whole.layers)
    first = FirstLogits(prompt_logits, decoding.call(whole).clone())
    model.set_attn_implementation(whole_cache.ATTENTION)
    step = _graph_of(decoding, whole)
    cosine = least_cosine(step(), first.token)
    result["whole_graph"] = decoding.measured(step, decoding.steps)
    result["whole_graph"] |= {"cosine_to_sdpa": cosine, "kernels": decode_clock.kernels(step)}
    step = None
    if compiled:
        with _no_room("whole_compiled"):
            result["whole_compiled"] = _compiled(decoding, whole)
    model.set_attn_implementation("sdpa")
    with _no_room("static_graph"):
        static = _static_of(model, whole, room=10 * SLOW_STEPS)
        step = _graph_of(decoding, static)
        result["static_graph"] = decoding.measured(step, SLOW_STEPS)
        result["static_graph"]["kernels"] = decode_clock.kernels(step, steps=2)
    step = static = None
    whole_cache.free()
    with _no_room("dynamic"):
        dynamic = DynamicCache(config=model.config)
        for i, layer in enumerate(whole.layers):
            dynamic.update(layer.keys[:, :, :-1], layer.values[:, :, :-1], i)
        result["dynamic"] = decoding.measured(lambda: decoding.call(dynamic), SLOW_STEPS)
    return result, first


def wavekv_side(
    decoding: Decoding, cache: WaveKVCache, chunk: int, asked: Series
) -> tuple[dict[str, Any], FirstLogits]:
    """WaveKV; returns as sdpa_sides, with the series that were asked for."""
    model, inputs = decoding.model, decoding.inputs
    result: dict[str, Any] = {}
    started = time.perf_counter()
    for part in inputs.prompt.split(chunk, dim=1):
        prompt_logits = model(part, past_key_values=cache, logits_to_keep=1).logits[:, -1]
    decode_clock.wait()
    prefilled = time.perf_counter()
    first = FirstLogits(prompt_logits, decoding.call(cache).clone())
    decode_clock.wait()
    indexed = time.perf_counter()
    result["prefill_s"] = round(prefilled - started, 2)
    result["index_s"] = round(indexed - prefilled, 2)
    result["kv_bytes"] = cache.device_bytes + cache.local_bytes
    step = _captured_step(decoding, cache) if inputs.prompt.is_cuda else lambda: decoding.call(cache)
    result["series"] = []
    for queries in asked.queries:
        series: dict[str, Any] = {"queries": queries}
        if cache.device_bytes:
            series |= block_caches.warm_up(
                step, inputs.cycle(queries), lambda: block_caches.glance(cache),
                asked.warm_steps, asked.warm_seconds,
            )  # fmt: skip
            before = block_caches.counted(cache)
        series |= decoding.measured(step, decoding.steps, queries) | {"hit_ratio": None}
        if cache.device_bytes:
            series["hit_ratio"] = block_caches.hit_ratio(before, block_caches.counted(cache))
        result["series"].append(series)
        print(f"wavekv: {series}", file=sys.stderr, flush=True)
    result["kernels"] = decode_clock.kernels(step)
    return result, first


def least_cosine(some: torch.Tensor, others: torch.Tensor) -> float:
    """Of the rows of two [batch, vocabulary]."""
    cosines = torch.cosine_similarity(some.float(), others.float(), dim=-1)
    return round(cosines.min().item(), 5)


def _graph_of(decoding: Decoding, cache: Any) -> decode_clock.Step:
    call = lambda: decoding.call(cache)  # noqa: E731
    return decode_clock.captured(call, call) if decoding.inputs.prompt.is_cuda else call


def _captured_step(decoding: Decoding, cache: WaveKVCache) -> decode_clock.Step:
    capturing = _Kept(cache.capturing())
    call = lambda: decoding.call(cache)  # noqa: E731
    replay = decode_clock.captured(call, call, capturing)

    def step() -> Any:
        capturing.made.advance()
        return replay()

    return step


class _Kept:
    """A context that keeps what it makes."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def __enter__(self) -> Any:
        self.made = self._context.__enter__()
        return self.made

    def __exit__(self, *error: Any) -> Any:
        return self._context.__exit__(*error)


def _static_of(model: Any, whole: Cache, room: int) -> StaticCache:
    tokens = whole.get_seq_length()
    static = StaticCache(config=model.config, max_cache_len=tokens + room)
    for target, source in zip(static.layers, whole.layers, strict=True):
        target.lazy_initialization(source.keys, source.values)
        target.keys[:, :, :tokens] = source.keys[:, :, :tokens]
        target.values[:, :, :tokens] = source.values[:, :, :tokens]
        target.cumulative_length.fill_(tokens)
    return static


def _compiled(decoding: Decoding, cache: Cache) -> dict[str, Any]:
    started = time.perf_counter()
    model = torch.compile(decoding.model, mode="reduce-overhead")
    whole = dataclasses.replace(decoding, model=model)
    step = lambda: whole.call(cache)  # noqa: E731
    for _ in range(decode_clock.WARM_UP_STEPS):
        step()
    decode_clock.wait()
    compile_s = round(time.perf_counter() - started, 1)
    result = whole.measured(step, decoding.steps) | {"compile_s": compile_s}
    torch.compiler.reset()
    return result


@contextlib.contextmanager
def _no_room(what: str) -> Any:
    """A side that does not fit, or that this torch cannot do, is left out, and that is said."""
    try:
        yield
    except Exception as error:
        print(f"{what} is left out: {type(error).__name__}: {error}"[:2000], file=sys.stderr)
        whole_cache.free()
