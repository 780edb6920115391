"""A prompt's keys, clustered on the GPU for the index that the daemon builds."""

from __future__ import annotations

import warnings
from typing import Any

import torch

from wavekv.errors import InvalidArgumentError, ResourceExhaustedError, UnimplementedError
from wavekv.session import Sequence
from wavekv.transformers.resident import Ordered
from wavekv.types import ModelShape

# The daemon cuts no segment that is shorter.
_SEGMENT_TOKENS_MIN = 128


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
        stream = _current_stream(keys.device)
        keys = keys.detach()
        launched = []
        try:
            for row, sequence in enumerate(sequences):
                tokens = keys.shape[2] - padding[row]
                if tokens < _SEGMENT_TOKENS_MIN:
                    continue
                plan = sequence.plan_index(layer, tokens)
                if plan:
                    rows = Ordered(keys[row, :, padding[row] :])
                    launched.append((sequence, self._labeller.launch(rows, plan, stream)))
            for sequence, labels in launched:
                sequence.give_labels(layer, labels.wait())
        except (InvalidArgumentError, ResourceExhaustedError, UnimplementedError) as error:
            self._labeller = None
            warnings.warn(
                f"the daemon clusters the prompt by itself, which takes longer: {error}",
                RuntimeWarning,
                stacklevel=2,
            )


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
