"""Starts real daemons for tests: own directory, bounded waits, stopped by process id."""

from __future__ import annotations

import os
import pathlib
import signal
import subprocess
import threading

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("WAVEKV_BIN_DIR", ROOT / "build" / "dev" / "bin"))
READY_SECONDS = 30.0


class Daemon:
    """A running wavekvd or wavebufferd; its log lines are kept for messages."""

    def __init__(self, program: str, *flags: str, **environment: str) -> None:
        self._lines: list[str] = []
        self._ready_or_over = threading.Event()
        self._process = subprocess.Popen(
            [str(BIN / program), *flags],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
            text=True,
        )
        # For as long as it runs: a daemon whose log nobody takes stands still when the pipe is full.
        self._reader = threading.Thread(target=self._read_log, daemon=True)
        self._reader.start()
        if not self._ready_or_over.wait(READY_SECONDS):
            self.stop()
            raise TimeoutError(f"{program} was not ready in time:\n{self.log}")
        if "event=ready" not in self.log:
            raise RuntimeError(f"{program} ended with {self.stop()}:\n{self.log}")

    def _read_log(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self._lines.append(line)
            if "event=ready" in line:
                self._ready_or_over.set()
        self._ready_or_over.set()

    @property
    def log(self) -> str:
        return "".join(self._lines)

    @property
    def pid(self) -> int:
        return self._process.pid

    def signal(self, number: int) -> None:
        self._process.send_signal(number)

    def suspend(self) -> None:
        """SIGSTOP; returns once it has stopped: until then a thread may still answer a call."""
        self._process.send_signal(signal.SIGSTOP)
        os.waitpid(self.pid, os.WUNTRACED)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def stop(self) -> int:
        """Asks it to end, waits, and returns the exit code."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout=20)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._reader.join()
        if self._process.stderr is not None:
            self._process.stderr.close()
        return self._process.returncode
