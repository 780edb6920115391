"""SmolLM2's attention through WaveKV: the few lines that connect an engine, and the comparison."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import wavekv
from smollm2_attention import F32
from smollm2_model import ModelConfig, SmolLM2
from smollm2_score import Scores, greedy_decode, score_steps
from smollm2_text import Document

# The names the daemon knows the cache's element types by.
_WAVEKV_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


class WaveKVAttention:
    """A StepAttention over a WaveKV sequence: one call appends the new token and attends.

    Attributes:
      counters: what all steps so far have read.
    """

    def __init__(self, sequence: wavekv.Sequence, budget: wavekv.Budget | None = None) -> None:
        self._sequence = sequence
        self._budget = budget
        self._dtype = wavekv.numpy_dtype(sequence.shape.dtype)
        self.counters = wavekv.StepCounters()

    def __call__(self, layer: int, q: F32, k: F32, v: F32) -> F32:
        step = self._sequence.attend(
            layer, q, k.astype(self._dtype), v.astype(self._dtype), budget=self._budget
        )
        self.counters += step.counters
        return step.out


class WaveKVSink:
    """A KvSink that hands the prefill's keys and values to a WaveKV sequence as they are made."""

    def __init__(self, sequence: wavekv.Sequence) -> None:
        self._sequence = sequence
        self._dtype = wavekv.numpy_dtype(sequence.shape.dtype)

    def __call__(self, layer: int, k: F32, v: F32) -> None:
        self._sequence.insert(
            self._sequence.token_count(layer),
            k.astype(self._dtype),
            v.astype(self._dtype),
            layers=[layer],
        )


@dataclasses.dataclass(frozen=True)
class WaveKVRun:
    """Outcome of scoring and decoding through WaveKV.

    Attributes:
      scores: of the document's targets.
      decoded: greedy continuation, the first token predicted by the last input.
      counters: of all steps.
      score_s, decode_s: seconds.
    """

    scores: Scores
    decoded: list[int]
    counters: wavekv.StepCounters
    score_s: float
    decode_s: float


def model_shape(config: ModelConfig, kv_dtype: str) -> wavekv.ModelShape:
    """The model's attention geometry as WaveKV wants it."""
    return wavekv.ModelShape(
        layers=config.n_layers,
        query_heads=config.n_q_heads,
        kv_heads=config.n_kv_heads,
        key_dim=config.head_dim,
        dtype=_WAVEKV_DTYPES[kv_dtype],
        model_id="SmolLM2-135M-Instruct",
    )


def run_wavekv(
    model: SmolLM2,
    document: Document,
    sequence: wavekv.Sequence,
    n_decode: int,
    budget: wavekv.Budget | None,
    progress: Callable[[int], None],
) -> WaveKVRun:
    """Scores the document token by token and decodes n_decode tokens, both through `sequence`.

    Args:
      model: the model.
      document: its prefill is what the sequence holds, indexed.
      sequence: extended by what is scored and decoded.
      n_decode: tokens to decode, at least 1.
      budget: of the retrieval zone; None is the daemon's default.
      progress: is told how many tokens are scored.
    """
    attention = WaveKVAttention(sequence, budget)
    n_prefill = len(document.prefill)
    started = time.perf_counter()
    scores = score_steps(
        model, document.inputs, document.targets, n_prefill, attention, progress
    )
    scored = time.perf_counter()
    first = int(scores.top1[-1])
    position = n_prefill + len(document.inputs)
    decoded = [first] + greedy_decode(model, first, position, attention, n_decode - 1)
    finished = time.perf_counter()
    return WaveKVRun(scores, decoded, attention.counters, scored - started, finished - scored)


def index_summary(cli: Path, address: str, sequence: wavekv.Sequence) -> str:
    """What the `wavekv` command says about the sequence's index."""
    done = subprocess.run(
        [cli, "index", str(sequence.id), "--address", address],
        capture_output=True,
        text=True,
        timeout=60,
    )
    return done.stdout if done.returncode == 0 else f"no index summary: {done.stderr.strip()}\n"


def build_progress(what: str) -> Callable[[int, int], None]:
    """A progress bar on standard error, drawn only on a terminal."""
    width = 30

    def report(done: int, total: int) -> None:
        if not sys.stderr.isatty() or not total:
            return
        filled = int(np.floor(width * done / total))
        end = "\n" if done >= total else ""
        bar = "#" * filled + "-" * (width - filled)
        print(f"\r{what} [{bar}] {done}/{total}", end=end, file=sys.stderr, flush=True)

    return report
