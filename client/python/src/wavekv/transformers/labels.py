"""A prompt's keys, clustered on the GPU for the index that the daemon builds."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch

from wavekv.errors import (
    InvalidArgumentError,
    ResourceExhaustedError,
    UnimplementedError,
    WaveKVError,
)
from wavekv.session import Sequence
from wavekv.transformers.resident import Ordered
from wavekv.types import ModelShape

# The daemon cuts no segment that is shorter.
_SEGMENT_TOKENS_MIN = 128
# Of a batch, rows that are clustered before the first one's labels are waited for.
_LAUNCHES_AHEAD = 32


class _NoLabelsError(RuntimeError):
    """The device made none."""


class PromptLabels:
    """Gives the daemon labels in place of its own k-means, where there is a kernel for the shape.

    An index without them is as good and only built more slowly: what keeps them from being made is a
    RuntimeWarning once, and nothing where wavekv has no CUDA or no kernel fits.
    """

    def __init__(self, shape: ModelShape, device: torch.device) -> None:
        self._labeller = _new_labeller(shape, device)

    def give(
        self, layer: int, sequences: list[Sequence], padding: list[int], keys: torch.Tensor
    ) -> None:
        """keys [batch, kv_heads, columns, dim]: of all columns so far, in the current stream. Errors
        of the daemon pass through."""
        if self._labeller is None:
            return
        try:
            self._give(layer, sequences, padding, keys.detach())
        except (
            _NoLabelsError,
            InvalidArgumentError,
            ResourceExhaustedError,
            UnimplementedError,
        ) as error:
            self._labeller = None
            warnings.warn(
                f"the daemon clusters the prompt by itself, which takes longer: {error}",
                RuntimeWarning,
                stacklevel=2,
            )

    def _give(
        self, layer: int, sequences: list[Sequence], padding: list[int], keys: torch.Tensor
    ) -> None:
        stream = _current_stream(keys.device)
        launched: list[tuple[Sequence, Any]] = []
        for row, sequence in enumerate(sequences):
            tokens = keys.shape[2] - padding[row]
            if tokens < _SEGMENT_TOKENS_MIN:
                continue
            plan = sequence.plan_index(layer, tokens)
            if not plan:
                continue
            if len(launched) == _LAUNCHES_AHEAD:
                _hand_over(layer, *launched.pop(0))
            rows = Ordered(keys[row, :, padding[row] :])
            launch = functools.partial(self._labeller.launch, rows, plan, stream)
            launched.append((sequence, _on_device(launch)))
        for sequence, labels in launched:
            _hand_over(layer, sequence, labels)


def _hand_over(layer: int, sequence: Sequence, labels: Any) -> None:
    sequence.give_labels(layer, _on_device(labels.wait))


def _on_device(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except (WaveKVError, ValueError, TypeError) as error:
        raise _NoLabelsError(str(error)) from error


def _current_stream(device: torch.device) -> Any:
    return torch.cuda.current_stream(device)


def _new_labeller(shape: ModelShape, device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    try:
        from wavekv import gpu  # Only there where wavekv was built with CUDA.

        return gpu.KeyLabeller(shape)
    except (ImportError, InvalidArgumentError):
        return None
