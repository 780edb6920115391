"""The sides that transformers_speed.py compares: one model, its keys and values in different caches."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import sys
import time
from collections.abc import Callable
from typing import Any

import decode_clock
import torch
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import Cache, CacheLayerMixin
from wavekv.transformers import WaveKVCache

# Steps of what copies gigabytes: they take as long every time.
SLOW_STEPS = 10


class Inputs:
    """The token of each row and its position, [batch, 1]: tensors that a graph may hold."""

    def __init__(self, prompt: torch.Tensor, vocabulary: int, changes: int) -> None:
        batch, tokens = prompt.shape
        self.prompt = prompt
        self.token = prompt[:, -1:].clone()
        self.position = torch.full_like(self.token, tokens)
        self._next = torch.randint(0, vocabulary, (changes, batch, 1)).to(prompt.device)
        self._changes = 0

    def change(self) -> None:
        """Another token at the next position."""
        self.token.copy_(self._next[self._changes % len(self._next)])
        self._changes += 1
        self.position += 1

    def every(self, steps: int) -> Callable[[int], None]:
        """Returns what changes the inputs before step i if it is its turn; 0: never."""
        return lambda i: self.change() if steps and i % steps == 0 else None


class WholeLayer(CacheLayerMixin):
    """Keys and values of fixed length whose last column is the newest token's.

    Nothing is masked and nothing grows, so that sdpa needs no mask and takes its fastest kernel: at
    least as fast as any static cache can be.
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

    def measured(self, step: decode_clock.Step, steps: int, change_every: int) -> dict[str, Any]:
        """Times steps after a few for warming up; adds tokens_per_s, from the mean of the steps."""
        before = self.inputs.every(change_every)
        for i in range(max(decode_clock.WARM_UP_STEPS, change_every)):
            before(i)
            step()
        result: dict[str, Any] = decode_clock.timed(step, steps, before)
        result["tokens_per_s"] = round(1e3 * len(self.inputs.token) / result["wall_ms_mean"], 1)
        return result


def sdpa_sides(decoding: Decoding, compiled: bool) -> tuple[dict[str, Any], torch.Tensor]:
    """transformers' own attention and caches. Returns what was measured, and the logits of the
    first token [batch, vocabulary]."""
    model, prompt = decoding.model, decoding.inputs.prompt
    on_gpu = prompt.is_cuda
    result: dict[str, Any] = {}
    started = time.perf_counter()
    whole = _prefilled(model, prompt)
    _wait(prompt)
    result["prefill_s"] = round(time.perf_counter() - started, 2)
    result["kv_bytes"] = sum(layer.keys.nbytes + layer.values.nbytes for layer in whole.layers)
    logits = decoding.call(whole).clone()

    def graph_of(cache: Any) -> decode_clock.Step:
        call = lambda: decoding.call(cache)  # noqa: E731
        return decode_clock.captured(call, call) if on_gpu else call

    step = graph_of(whole)
    result["whole_graph"] = decoding.measured(step, decoding.steps, 1)
    result["whole_graph"]["kernels"] = decode_clock.kernels(step)
    step = None
    if compiled:
        with _no_room("whole_compiled"):
            result["whole_compiled"] = _compiled(decoding, whole)
    with _no_room("static_graph"):
        static = _static_of(model, whole, room=10 * SLOW_STEPS)
        step = graph_of(static)
        result["static_graph"] = decoding.measured(step, SLOW_STEPS, 1)
        result["static_graph"]["kernels"] = decode_clock.kernels(step, steps=2)
    step = static = None
    _free()
    with _no_room("dynamic"):
        dynamic = DynamicCache(config=model.config)
        for i, layer in enumerate(whole.layers):
            dynamic.update(layer.keys[:, :, :-1], layer.values[:, :, :-1], i)
        result["dynamic"] = decoding.measured(lambda: decoding.call(dynamic), SLOW_STEPS, 1)
    return result, logits


def wavekv_side(
    decoding: Decoding, cache: WaveKVCache, chunk: int, change_every: list[int]
) -> tuple[dict[str, Any], torch.Tensor]:
    """WaveKV; returns as sdpa_sides. One series for each of `change_every`, which it names."""
    model, inputs = decoding.model, decoding.inputs
    result: dict[str, Any] = {}
    started = time.perf_counter()
    for part in inputs.prompt.split(chunk, dim=1):
        model(part, past_key_values=cache, logits_to_keep=1)
    _wait(inputs.prompt)
    prefilled = time.perf_counter()
    logits = decoding.call(cache).clone()
    _wait(inputs.prompt)
    indexed = time.perf_counter()
    result["prefill_s"] = round(prefilled - started, 2)
    result["index_s"] = round(indexed - prefilled, 2)
    result["kv_bytes"] = cache.device_bytes + cache.local_bytes
    step = _captured_step(decoding, cache) if inputs.prompt.is_cuda else lambda: decoding.call(cache)
    result["series"] = []
    for every in change_every:
        before = _blocks(cache)
        series = {"change_every": every} | decoding.measured(step, decoding.steps, every)
        series["hit_ratio"] = _hit_ratio(before, _blocks(cache))
        result["series"].append(series)
        print(f"wavekv: {series}", file=sys.stderr, flush=True)
    result["kernels"] = decode_clock.kernels(step)
    return result, logits


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


def _blocks(cache: WaveKVCache) -> tuple[int, int] | None:
    """Returns (hits, misses) of the rows' block caches, once the daemon has read them all; None where
    steps are not on a GPU."""
    if not cache.device_bytes:
        return None
    last = None
    for _ in range(40):
        # No index is ever so far: the first row waits, so that the daemon can read on.
        states = [
            sequence.resident_status(1 << 40, wait=0.0 if i else 0.25)
            for i, sequence in enumerate(cache.sequences)
        ]
        found = sum(state.hit_blocks for state in states), sum(state.miss_blocks for state in states)
        if found == last:
            return found
        last = found
    raise RuntimeError("the daemon's counters of hits and misses do not come to rest")


def _hit_ratio(before: tuple[int, int] | None, after: tuple[int, int] | None) -> float | None:
    if before is None or after is None:
        return None
    hits, misses = after[0] - before[0], after[1] - before[1]
    return round(hits / (hits + misses), 4) if hits + misses else None


def _prefilled(model: Any, prompt: torch.Tensor) -> Cache:
    """A cache of WholeLayers with the prompt and a column more; a row at a time, for its memory."""
    batch, tokens = prompt.shape
    layers: list[WholeLayer] = []
    for row in range(batch):
        cache = DynamicCache(config=model.config)
        model(prompt[row : row + 1], past_key_values=cache, logits_to_keep=1)
        for i, layer in enumerate(cache.layers):
            if row == 0:
                _, heads, _, dim = layer.keys.shape
                layers.append(WholeLayer((batch, heads, tokens + 1, dim), layer.keys))
            layers[i].keys[row, :, :tokens] = layer.keys[0]
            layers[i].values[row, :, :tokens] = layer.values[0]
        del cache
        _free()
    return Cache(layers=layers)


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
    _wait(decoding.inputs.prompt)
    compile_s = round(time.perf_counter() - started, 1)
    result = whole.measured(step, decoding.steps, 1) | {"compile_s": compile_s}
    torch.compiler.reset()
    return result


@contextlib.contextmanager
def _no_room(what: str) -> Any:
    """A side that does not fit, or that this torch cannot do, is left out, and that is said."""
    try:
        yield
    except Exception as error:
        print(f"{what} is left out: {type(error).__name__}: {error}"[:2000], file=sys.stderr)
        _free()


def _free() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _wait(tensor: torch.Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()
