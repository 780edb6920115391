"""The block caches on the GPU of a WaveKVCache's rows: how often steps hit them, and warming them up."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import decode_clock
from wavekv.transformers import WaveKVCache

# (hits, misses) of blocks, since the rows were attached.
Blocks = tuple[int, int]
WINDOW_STEPS = 20
# The hit ratio of the windows of so many seconds lies within so much: the caches have settled. The
# daemon moves at most an eighth of a cache in a round.
SETTLED_SECONDS = 0.75
SETTLED_WITHIN = 0.02


def glance(cache: WaveKVCache) -> Blocks:
    """What the daemon has counted so far; it lags behind the steps by a round or two."""
    states = [sequence.resident_status() for sequence in cache.sequences]
    return sum(state.hit_blocks for state in states), sum(state.miss_blocks for state in states)


def counted(cache: WaveKVCache) -> Blocks:
    """What the steps so far have hit and missed, once the daemon has read it all."""
    last = None
    for _ in range(40):
        # No index is ever so far: the first row waits, so that the daemon can read on.
        cache.sequences[0].resident_status(1 << 40, wait=0.25)
        found = glance(cache)
        if found == last:
            return found
        last = found
    raise RuntimeError("the daemon's counters of hits and misses do not come to rest")


def hit_ratio(before: Blocks, after: Blocks) -> float | None:
    """Of the blocks that were asked for in between; None if none was."""
    hits, misses = after[0] - before[0], after[1] - before[1]
    return round(hits / (hits + misses), 4) if hits + misses else None


def warm_up(
    step: decode_clock.Step,
    before: Callable[[int], None],
    blocks: Callable[[], Blocks],
    steps_max: int,
    seconds_max: float,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, Any]:
    """Takes steps until the hit ratio has come to rest, or one of the limits is reached.

    before(i): what is done before step i. blocks: the counters, asked once in WINDOW_STEPS steps.
    Returns warm_steps, warm_s, warm_hit_ratio (of the last window that was counted) and settled.
    """
    started = clock()
    last = blocks()
    windows: list[tuple[float, float]] = []  # When it was counted, and its hit ratio.
    steps, seconds, settled = 0, 0.0, False
    while not settled and steps < steps_max and seconds < seconds_max:
        for i in range(steps, steps + WINDOW_STEPS):
            before(i)
            step()
        decode_clock.wait()
        steps += WINDOW_STEPS
        seconds = clock() - started
        now = blocks()
        ratio = hit_ratio(last, now)
        if ratio is not None:  # The daemon may not have read on.
            windows.append((seconds, ratio))
            last = now
        settled = _settled(windows)
    return {
        "warm_steps": steps,
        "warm_s": round(seconds, 2),
        "warm_hit_ratio": windows[-1][1] if windows else None,
        "settled": settled,
    }


def _settled(windows: list[tuple[float, float]]) -> bool:
    if not windows or windows[-1][0] - windows[0][0] < SETTLED_SECONDS:
        return False
    newest = [ratio for seconds, ratio in windows if windows[-1][0] - seconds <= SETTLED_SECONDS]
    return len(newest) > 2 and max(newest) - min(newest) <= SETTLED_WITHIN
