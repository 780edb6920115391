"""A batch's steps on the GPU itself: inside the model's stream, without the daemon in between."""

from __future__ import annotations

import contextlib
import time
import warnings
from typing import Any

import torch

from wavekv.errors import (
    FailedPreconditionError,
    InvalidArgumentError,
    ResourceExhaustedError,
    UnavailableError,
    WaveKVError,
)
from wavekv.session import Sequence
from wavekv.types import Budget, ModelShape

# Why a batch is served from host memory instead, if it may be: the daemon, or the model, is made
# for that. A daemon that is away is not among them.
_REFUSALS = (
    FailedPreconditionError,
    ImportError,
    InvalidArgumentError,
    ResourceExhaustedError,
    ValueError,
)
# Seconds that one question to the daemon may wait for its index to move on.
_WAIT = 1.0


class LostStepError(UnavailableError):
    """A token was attended over nothing: what the model made of it since is wrong."""


def on_gpu(states: torch.Tensor) -> bool:
    """Whether steps over these states could be taken on the device they are on."""
    return states.is_cuda


def device_memory(states: torch.Tensor) -> int:
    """Bytes of memory of the GPU that these states are on."""
    return torch.cuda.get_device_properties(states.device).total_memory


def _new_batch(shape: ModelShape, max_tokens: int, batch: int) -> Any:
    from wavekv import gpu  # Only there where wavekv was built with CUDA.

    return gpu.ResidentBatch(shape, max_tokens, batch)


class Ordered:
    """A tensor that the current stream has made, lent to that stream: asked for another, torch would
    record an event and wait for it, since it does not know its own stream by the handle."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor
        self.__dlpack_device__ = tensor.__dlpack_device__

    def __dlpack__(self, *, stream: int | None = None) -> Any:
        del stream
        return self._tensor.__dlpack__(stream=-1)


class ResidentSteps:
    """Sequences attached to the GPU, until `leave`. One thread at a time.

    A token is `reserve` on the host and then kernels, which a CUDA graph may hold. Nothing here
    waits for the device but `leave`; nothing asks the daemon but making it, `leave`, and a token for
    which a sequence's ring of exact tokens has no room.

    Attributes:
      batch: the wavekv.gpu.ResidentBatch, which outlives them: a graph knows nothing else.
      region_bytes: of GPU memory that the sequences hold.
    """

    def __init__(
        self, sequences: list[Sequence], batch: Any, deadline: float, cache_ratio: float
    ) -> None:
        """Attaches all sequences, or none: raises what the daemon or the device say then."""
        self._sequences = sequences
        self._deadline = deadline
        self.batch = batch
        self._covered = [0] * len(sequences)
        self.region_bytes = 0
        self._last_stream: Any = None  # Of the steps.
        with contextlib.ExitStack() as undo:
            for entry, sequence in enumerate(sequences):
                attachment = sequence.attach_resident(cache_ratio=cache_ratio)
                undo.callback(sequence.detach_resident)
                self.region_bytes += attachment.region_bytes
                opened = batch.open(attachment)
                batch.set_sequence(entry, opened, self._stream())
                undo.callback(batch.set_sequence, entry, None, self._stream())
            undo.pop_all()

    def reserve(self) -> None:
        """What a token needs on the host before it is submitted in the stream that is current.

        Raises LostStepError when an earlier token was attended over nothing, and UnavailableError
        when the daemon makes no room within the deadline.
        """
        self._last_stream = self._stream()
        for entry, sequence in enumerate(self._sequences):
            self._check(entry, sequence)
            if self.batch.room(entry) == 0:
                self._wait_for_room(entry, sequence)
        self.batch.reserve_token()

    def submit(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        """Appends a reserved token to each sequence's layer and attends, behind what is queued.

        queries [batch, query_heads, 1, dim], keys and values [batch, kv_heads, 1, dim], on the GPU.
        Returns [batch, query_heads, 1, dim] of their dtype. Layers come in order, 0 first. Kernels
        alone: the stream may be one that a CUDA graph is captured from.
        """
        stream = self._stream()
        if layer == 0:
            self.batch.begin_token(stream)
        q, k, v = (states.detach()[:, :, 0].contiguous() for states in (queries, keys, values))
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
        self.batch.attend(
            layer, Ordered(q), Ordered(out), Ordered(lse), stream,
            keys=Ordered(k), values=Ordered(v),
        )  # fmt: skip
        return out[:, :, None]

    def leave(self) -> None:
        """Waits for the stream; what was appended is stored, and the sequences are detached.

        Raises the first error, when all that can be is detached: LostStepError if the last token
        was attended over nothing.
        """
        stream = self._last_stream or self._stream()
        stream.synchronize()
        errors: list[Exception] = []
        for entry, sequence in enumerate(self._sequences):
            for call in (
                lambda entry=entry, sequence=sequence: self._check(entry, sequence),
                lambda entry=entry: self.batch.set_sequence(entry, None, stream),
                sequence.detach_resident,
            ):
                try:
                    call()
                except (WaveKVError, ValueError) as error:
                    errors.append(error)
        if errors:
            raise errors[0]

    def _check(self, entry: int, sequence: Sequence) -> None:
        outcome = self.batch.outcome(entry)
        if outcome in ("pending", "attending"):
            return
        try:
            ended = sequence.resident_status().ended
        except WaveKVError as error:
            ended = error
        raise LostStepError(
            f"row {entry} attended over nothing in an earlier token: its region is "
            f"{outcome}" + (f" ({ended})" if ended else "")
        )

    def _wait_for_room(self, entry: int, sequence: Sequence) -> None:
        end = time.monotonic() + self._deadline
        while self.batch.room(entry) == 0:
            left = end - time.monotonic()
            if left <= 0:
                raise UnavailableError(
                    f"row {entry}: the daemon has clustered {self._covered[entry]} of "
                    f"{self.batch.tokens(entry)} tokens and did not go on for {self._deadline} s"
                )
            state = sequence.resident_status(self._covered[entry], wait=min(_WAIT, left))
            if state.ended is not None:
                raise state.ended
            self._covered[entry] = state.steady_first
            self.batch.note_covered(entry, state.steady_first)

    def _stream(self) -> Any:
        return torch.cuda.current_stream(self.batch.device)


def try_resident(
    sequences: list[Sequence],
    shape: ModelShape,
    max_tokens: int,
    batch: Any = None,
    *,
    budgets: tuple[Budget | None, Budget | None],
    deadline: float,
    cache_ratio: float,
    required: bool,
) -> ResidentSteps | None:
    """Attaches the sequences; None, with a RuntimeWarning that says why, if they cannot be.

    batch: one of earlier steps of as many sequences, a new one if None. budgets: that of the
    sequences, and that of the steps. required: raise instead. A daemon that fails in any other way is
    an exception in both cases.
    """
    try:
        if budgets[1] not in (None, budgets[0]):
            raise InvalidArgumentError(
                f"on a GPU the budget is that of the sequence, {budgets[0]}; found {budgets[1]}"
            )
        if batch is None:
            batch = _new_batch(shape, max_tokens, len(sequences))
        return ResidentSteps(sequences, batch, deadline, cache_ratio)
    except _REFUSALS as error:
        if required:
            raise
        warnings.warn(
            f"steps go through host memory, which is slower: {error}. Say "
            "WaveKVCache(..., resident=False) to have it so without this warning",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
