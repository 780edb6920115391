"""Starts real daemons for tests: own directory, bounded waits, stopped by process id."""

from __future__ import annotations

import os
import pathlib
import selectors
import signal
import subprocess
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = pathlib.Path(os.environ.get("WAVEKV_BIN_DIR", ROOT / "build" / "dev" / "bin"))
READY_SECONDS = 30.0


class Daemon:
    """A running wavekvd or wavebufferd; its log lines are kept for messages."""

    def __init__(self, program: str, *flags: str, **environment: str) -> None:
        self.log = ""
        self._process = subprocess.Popen(
            [str(BIN / program), *flags],
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment},
        )
        self._wait_ready(program)

    @property
    def pid(self) -> int:
        return self._process.pid

    def _wait_ready(self, program: str) -> None:
        stream = self._process.stderr
        assert stream is not None
        os.set_blocking(stream.fileno(), False)
        deadline = time.monotonic() + READY_SECONDS
        with selectors.DefaultSelector() as selector:
            selector.register(stream, selectors.EVENT_READ)
            while "event=ready" not in self.log:
                left = deadline - time.monotonic()
                if left <= 0 or not selector.select(left):
                    self.stop()
                    raise TimeoutError(f"{program} was not ready in time:\n{self.log}")
                data = stream.read()
                if data == b"":
                    raise RuntimeError(f"{program} ended with {self._process.wait()}:\n{self.log}")
                self.log += (data or b"").decode()

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
        if self._process.stderr and not self._process.stderr.closed:
            self._process.stderr.close()
        return self._process.returncode
