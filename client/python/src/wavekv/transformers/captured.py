"""A decode pass in a CUDA graph: what may go into it, and what the host does before each replay."""

from __future__ import annotations

from collections.abc import Callable

import torch

from wavekv.errors import FailedPreconditionError
from wavekv.transformers.models import UnsupportedModelError
from wavekv.transformers.resident import ResidentSteps


class CapturedPass:
    """A pass of one token a row that WaveKVCache.capturing() saw go into a CUDA graph.

    Passes of one token without the graph may come between replays. Passes of several tokens, crop,
    reordering and fork take the rows off the GPU: after the next prompt and a token without the
    graph, or some tokens without it, it is good again. It ends with a reset, with close, and when rows
    are added or removed. A graph that is replayed while the rows are not on the GPU attends over
    nothing. The object keeps the cache, and what the graph's kernels read: destroy the graph first. For
    the thread that uses the cache.

    Attributes:
      batch: that the graph's kernels work for.
      complete: all layers were captured.
    """

    def __init__(
        self, steps: ResidentSteps, layers: int, advance: Callable[[CapturedPass], None]
    ) -> None:
        """advance: counts a token of the cache for this pass."""
        self.batch = steps.batch
        self.complete = False
        self._steps: ResidentSteps | None = steps  # While it is captured.
        self._layers = layers
        self._advance = advance
        self._begun = 0  # Layers so far.

    def advance(self) -> None:
        """Call it before each replay, which must be in the stream that is current now.

        Counts the token that the replay appends to every row, and looks how the earlier ones went.
        Waits only when the daemon is so far behind that the rows have no room for a token, as a
        pass without a graph would.

        Raises FailedPreconditionError when the graph must not be replayed now, and the WaveKVError
        that a pass would raise when the daemon fails.
        """
        self._advance(self)

    def begin(self, layer: int, new_columns: int) -> None:
        """Checks that a layer of the pass is the next one, and of one token."""
        if new_columns != 1:
            raise FailedPreconditionError(
                f"a pass of {new_columns} tokens a row inside capturing(), expected 1"
            )
        if layer != self._begun:
            raise FailedPreconditionError(
                f"layer {layer} after {self._begun} of {self._layers} layers inside capturing(), "
                "expected one pass of the model, with all its layers in order"
            )
        self._begun += 1

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        """Submits a layer: shapes as ResidentSteps.submit."""
        if mask is not None:
            raise UnsupportedModelError(
                "an attention mask inside capturing(): call the model without attention_mask, the "
                "padding of the rows is known from the prompt"
            )
        assert self._steps is not None
        return self._steps.submit(layer, query, keys, values)

    def finish(self) -> None:
        """Checks that nothing is missing."""
        if self._begun != self._layers:
            raise FailedPreconditionError(
                f"{self._begun} of {self._layers} layers were attended inside capturing(), expected "
                "one pass of the model"
            )
        self.complete = True

    def end(self) -> None:
        """Ends the capture, whatever became of it."""
        self._steps = None
