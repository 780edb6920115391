"""A wavebufferd on a GPU and a wavekvd of one's own, for benchmarks: logs in files, stopped by id."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
READY_SECONDS = 120.0
STOP_SECONDS = 60.0
GIB = 1 << 30
# wavebufferd's context on the GPU, and room to round up.
_BUFFER_BESIDE_BYTES = 2 * GIB
# The model's process, the daemons and torch, beside the pool.
_HOST_BESIDE_BYTES = 10 * GIB


@dataclasses.dataclass(frozen=True)
class Need:
    """What sequences of one shape need.

    Attributes:
      payload_bytes: keys and values of max_tokens, all rows and layers.
      pool_bytes: --pool_bytes for them, index included.
      wave_buffer_bytes: --wave_buffer_bytes for them, attached.
    """

    payload_bytes: int
    pool_bytes: int
    wave_buffer_bytes: int


def need_of(
    rows: int, layers: int, kv_heads: int, dim: int, max_tokens: int, cache_ratio: float
) -> Need:
    """Keys and values of 2 bytes. What the daemon reserves was measured: 1.36 times the payload and,
    for a layer of 8 heads of 128, 84 MB."""
    payload = rows * layers * kv_heads * dim * max_tokens * 4
    pool = 1.4 * payload + rows * layers * kv_heads * dim * (96 << 10) + GIB
    # An index is about 7 % of the payload; a head's ring and log have a size of their own.
    buffer = (0.15 + cache_ratio) * payload + rows * layers * kv_heads * dim * (40 << 10) + GIB
    return Need(payload, int(pool), int(buffer))


def check_host_memory(need: Need, what: str) -> None:
    """Raises ValueError if the machine has too little memory for the pool."""
    with open("/proc/meminfo", encoding="utf-8") as file:
        kib = dict(line.split()[:2] for line in file)
    free = int(kib["MemAvailable:"]) << 10
    wanted = need.pool_bytes + _HOST_BESIDE_BYTES
    if wanted > free:
        raise ValueError(
            f"{what} needs {wanted / GIB:.0f} GiB of host memory ({need.pool_bytes / GIB:.0f} of them "
            f"for the pool), {free / GIB:.0f} are available: take fewer layers, rows or tokens"
        )


@contextlib.contextmanager
def daemons(need: Need, backend: str, logs: Path | None) -> Iterator[str]:
    """Starts both; yields wavekvd's address. backend: wavebufferd's, "cuda" or "host"; logs: the
    folder for their logs, thrown away if None. Programs are those of WAVEKV_BIN_DIR."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wavekv-")))
        logs = logs or folder
        logs.mkdir(parents=True, exist_ok=True)
        buffer, socket = f"unix:{folder}/b", f"unix:{folder}/k"
        wanted = need.wave_buffer_bytes + _BUFFER_BESIDE_BYTES
        stack.enter_context(
            _running(
                logs, "wavebufferd", f"--listen={buffer}", f"--backend={backend}",
                f"--bytes_max={wanted}",
            )
        )  # fmt: skip
        stack.enter_context(
            _running(
                logs, "wavekvd", f"--listen={socket}", f"--pool_bytes={need.pool_bytes}",
                f"--wave_buffer={buffer}", f"--wave_buffer_bytes={need.wave_buffer_bytes}",
                f"--data_arena_bytes={256 << 20}",
            )
        )  # fmt: skip
        yield socket


@contextlib.contextmanager
def _running(logs: Path, program: str, *flags: str) -> Iterator[None]:
    binary = Path(os.environ.get("WAVEKV_BIN_DIR", ROOT / "build" / "release" / "bin")) / program
    log = logs / f"{program}.log"
    with open(log, "ab") as sink:
        begin = sink.tell()
        process = subprocess.Popen([binary, *flags], stderr=sink, stdin=subprocess.DEVNULL)
    try:
        end = time.monotonic() + READY_SECONDS
        while b"event=ready" not in log.read_bytes()[begin:]:
            if process.poll() is not None or time.monotonic() > end:
                raise RuntimeError(
                    f"{program} {' '.join(flags)} is not ready "
                    f"(exit status {process.poll()}):\n{log.read_bytes()[begin:].decode()}"
                )
            time.sleep(0.02)
        yield
    finally:
        process.terminate()
        try:
            process.wait(STOP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
