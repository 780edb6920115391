"""How long a decode step takes: as a CUDA graph or as it is, on the host's clock and the GPU's."""

from __future__ import annotations

import contextlib
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch

Step = Callable[[], Any]
WARM_UP_STEPS = 3


def captured(call: Step, warm_up: Step, capturing: Any = None) -> Step:
    """Returns a replay of `call` as a CUDA graph.

    warm_up: what is done a few times before, on the stream that replays. capturing: a context that
    wants to be around the capture.
    """
    for _ in range(WARM_UP_STEPS):
        warm_up()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with capturing or contextlib.nullcontext(), torch.cuda.graph(graph):
        kept = call()

    def replay() -> Any:
        graph.replay()
        return kept

    return replay


def timed(step: Step, steps: int, before: Callable[[int], None]) -> dict[str, float]:
    """Times steps one by one, each waited for, and then as many with one wait at the end.

    before(i): what is done before a step, outside the time. Milliseconds of a step: wall_ms_median
    and _mean, on a GPU gpu_ms_median and _mean, and queued_ms (from the ones with one wait).
    """
    on_gpu = torch.cuda.is_available()
    wall, gpu = [], []
    for i in range(steps):
        before(i)
        wait()
        if on_gpu:
            events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
            events[0].record()
        started = time.perf_counter()
        step()
        if on_gpu:
            events[1].record()
        wait()
        wall.append(1e3 * (time.perf_counter() - started))
        if on_gpu:
            gpu.append(events[0].elapsed_time(events[1]))
    result = {"wall_ms_median": statistics.median(wall), "wall_ms_mean": statistics.mean(wall)}
    if gpu:
        result |= {"gpu_ms_median": statistics.median(gpu), "gpu_ms_mean": statistics.mean(gpu)}
    started = time.perf_counter()
    for i in range(steps):
        before(i)
        step()
    wait()
    result["queued_ms"] = 1e3 * (time.perf_counter() - started) / steps
    return {name: round(value, 4) for name, value in result.items()}


def kernels(step: Step, steps: int = 5, top: int = 12) -> list[dict[str, Any]]:
    """Returns the kernels that take the longest in a step: name, microseconds and launches a step;
    none without a GPU."""
    if not torch.cuda.is_available():
        return []
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            for _ in range(steps):
                step()
            wait()
        found = [
            {
                "kernel": event.key[:100],
                "us": round(event.self_device_time_total / steps, 1),
                "launches": event.count / steps,
            }
            for event in profile.key_averages()
            if event.self_device_time_total > 0
        ]
    except RuntimeError as error:  # Where the driver lends nobody its counters.
        print(f"no profile: {error}", file=sys.stderr)
        return []
    found.sort(key=lambda row: -row["us"])
    rest = {"kernel": "the others", "us": round(sum(row["us"] for row in found[top:]), 1),
            "launches": sum(row["launches"] for row in found[top:])}  # fmt: skip
    return found[:top] + [rest] * bool(found[top:])


def wait() -> None:
    """Waits for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
