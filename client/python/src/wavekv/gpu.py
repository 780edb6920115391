"""Attention over resident sequences on a GPU, in the engine's own stream.

    from wavekv import gpu

    batch = gpu.ResidentBatch(shape, max_tokens=131072, batch=2)
    attachment = sequence.attach_resident()  # after sequence.build_index()
    batch.set_sequence(0, batch.open(attachment), stream)
    covered = 0
    while decoding:
        while batch.room(0) == 0:
            covered = sequence.resident_status(covered, wait=10).steady_first
            batch.note_covered(0, covered)
        batch.reserve_token()
        batch.begin_token(stream)
        for layer in range(shape.layers):
            batch.attend(layer, q, out, lse, stream, keys=k, values=v)

Tensors are any that speak DLPack on a GPU (torch, cupy, jax), dense and row-major; no library of
theirs is imported. Streams are integer handles, or objects with `cuda_stream` as torch's. Kernels run
behind the calls: tensors live until the stream has passed them. `begin_token` and `attend` may be
captured in a CUDA graph; then reserve_token is called before each launch of it.

Importing this module raises ImportError where wavekv was built without the CUDA Toolkit.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import numpy as np

from wavekv import _core
from wavekv.session import Sequence
from wavekv.types import ModelShape, PlannedSegment, SegmentLabels, numpy_dtype

try:
    import wavekv._gpu as _gpu
except ModuleNotFoundError as error:
    if error.name != "wavekv._gpu":
        raise
    raise ImportError(
        "this wavekv was built without CUDA: install the CUDA Toolkit (nvcc), and install the "
        "package again from its source"
    ) from None

__all__ = [
    "CudaArray",
    "KeyLabeller",
    "KeyLabels",
    "OpenedSequence",
    "ResidentAttachment",
    "ResidentBatch",
    "Stream",
    "insert",
]


class CudaArray(Protocol):
    """A tensor on a GPU."""

    def __dlpack__(self, *, stream: int | None = None) -> Any: ...

    def __dlpack_device__(self) -> tuple[int, int]: ...


class HasCudaStream(Protocol):
    cuda_stream: int


Stream = int | HasCudaStream

# What Sequence.attach_resident returns.
ResidentAttachment = _core.ResidentAttachment

# A sequence that a batch has opened: keeps the mappings of its memory for as long as it lives.
OpenedSequence = _gpu.OpenedSequence


class ResidentBatch:
    """A batch of sequences that this process attends over on the device itself.

    Lies on the device that is current when it is made. open, note_covered, note_stored, room,
    tokens and outcome may be called from any thread, the others from one at a time.

    shape: the model's; dtype "bf16" or "f16", key_dim 64, 128 or 256 and value_dim the same. batch:
    entries, each a sequence or empty. Capacities of 0 follow from max_tokens, and suit an index of
    16 tokens a cluster: cluster_capacity and segment_capacity of a head's index, retrieve_capacity
    of the clusters that a step of a head retrieves. Such a step has no sketches: where the budget
    sketches clusters, more are retrieved instead.

    Raises FailedPreconditionError without a driver or a GPU, InvalidArgumentError or ValueError for
    what no kernel does, ResourceExhaustedError when the device has too little memory.
    """

    def __init__(
        self,
        shape: ModelShape,
        max_tokens: int,
        batch: int = 1,
        *,
        cluster_capacity: int = 0,
        segment_capacity: int = 0,
        retrieve_capacity: int = 0,
    ) -> None:
        self.shape = shape
        self.batch = batch
        self._core = _gpu.ResidentBatch(
            shape._to_core(), max_tokens, batch, cluster_capacity, segment_capacity, retrieve_capacity
        )

    @property
    def device(self) -> int:
        """The batch's device, as CUDA numbers them in this process."""
        return self._core.device

    @property
    def device_uuid(self) -> str:
        return self._core.device_uuid

    def open(self, attachment: ResidentAttachment, timeout: float = 10.0) -> OpenedSequence:
        """Opens what Sequence.attach_resident returned: imports the wave buffer and registers the
        block pool's memory, unless another sequence has. Takes 75 ms for each GB.

        Raises FailedPreconditionError when the buffer lies on another device, InvalidArgumentError
        when sequence and batch differ or a capacity is too small.
        """
        return self._core.open(attachment, round(timeout * 1000))

    def set_sequence(self, entry: int, sequence: OpenedSequence | None, stream: Stream) -> None:
        """Makes `sequence`, or nothing, the entry's from the stream's next token on. Not in a
        captured stream. Raises FailedPreconditionError when it is another entry's."""
        self._core.set_sequence(entry, sequence, stream)

    def reserve_token(self) -> None:
        """Counts a token of every sequence before it is submitted. Raises UnavailableError when one
        has no room, counting nothing: ask the daemon, note_covered, and try again."""
        self._core.reserve_token()

    def begin_token(self, stream: Stream) -> None:
        """Finds what every sequence has published. Each layer is attended to once afterwards."""
        self._core.begin_token(stream)

    def attend(
        self,
        layer: int,
        queries: CudaArray,
        out: CudaArray,
        lse: CudaArray,
        stream: Stream,
        *,
        keys: CudaArray | None = None,
        values: CudaArray | None = None,
    ) -> None:
        """Appends the new token of each sequence to a layer and attends over all that is stored.

        queries and out [batch, query_heads, key_dim], keys and values [batch, kv_heads, key_dim] of
        the shape's dtype; lse [batch, query_heads] float32, natural log. An empty entry gets zeros
        and -inf. Without keys and values nothing is appended. Raises TypeError or ValueError that
        names the tensor, found and expected.
        """
        self._core.attend(layer, queries, keys, values, out, lse, stream)

    def note_covered(self, entry: int, steady_first: int) -> None:
        """The daemon says that its index covers positions up to `steady_first`."""
        self._core.note_covered(entry, steady_first)

    def note_stored(self, entry: int, token_count: int, steady_first: int) -> None:
        """After an insert into, or a truncation of, the drained sequence."""
        self._core.note_stored(entry, token_count, steady_first)

    def room(self, entry: int) -> int:
        """Returns how many tokens reserve_token grants now."""
        return self._core.room(entry)

    def tokens(self, entry: int) -> int:
        """Returns the tokens of the entry's sequence, those submitted included."""
        return self._core.tokens(entry)

    def outcome(self, entry: int) -> str:
        """Returns what became of the entry in the last token that has begun on the device: "empty",
        "pending" (none has begun since it was set), "attending", or, attended over nothing,
        "closed", "does not fit" or "malformed". Never waits."""
        return self._core.outcome(entry)


class KeyLabels:
    """What one launch of a KeyLabeller labels."""

    def __init__(self, core: _gpu.KeyLabels, kv_heads: int) -> None:
        self._core = core
        self._kv_heads = kv_heads

    def __len__(self) -> int:
        """Returns how many segments are labelled: those that a kernel takes and whose keys are there."""
        return self._core.segment_count

    @property
    def ready(self) -> bool:
        """Whether wait would return at once."""
        return self._core.ready

    def wait(self) -> list[SegmentLabels]:
        """Returns the labels, as Sequence.give_labels takes them, once the stream has come so far."""
        return [SegmentLabels(*one) for one in self._core.wait(self._kv_heads)]


class KeyLabeller:
    """Clusters freshly made keys on the GPU, in the engine's stream, for the daemon's index.

        labeller = gpu.KeyLabeller(shape)
        plan = sequence.plan_index(layer, tokens)
        labels = labeller.launch(keys, plan, stream)  # [kv_heads, tokens, key_dim]
        sequence.give_labels(layer, labels.wait())    # then sequence.insert, then build_index

    Segments up to 8,192 tokens and 512 clusters; others are left to the daemon. Thread-safe. Raises
    InvalidArgumentError for a key_dim other than 64, 128 or 256, or another dtype than "bf16", "f16".
    """

    def __init__(self, shape: ModelShape) -> None:
        self._core = _gpu.KeyLabeller(shape._to_core())
        self._kv_heads = shape.kv_heads

    def launch(
        self,
        keys: CudaArray,
        segments: Iterable[PlannedSegment],
        stream: Stream,
        first_position: int = 0,
    ) -> KeyLabels:
        """Queues k-means of those segments whose keys are there, and the copy of their labels.

        keys [kv_heads, tokens, key_dim] from first_position on, of any strides that are multiples of
        8 elements, a key's own elements in a row. They live until the stream has passed. Does not
        wait for it, but for the memory that the first launch of its size allocates. Raises
        ResourceExhaustedError when there is none.
        """
        planned = [(one.first_position, one.tokens, one.clusters) for one in segments]
        return KeyLabels(self._core.launch(keys, first_position, planned, stream), self._kv_heads)


_copier: _gpu.HostCopier | None = None


def _to_host(array: CudaArray, what: str, stream: Stream) -> np.ndarray:
    """Returns a copy of a tensor on a GPU, made in the order of `stream`, which it waits for."""
    global _copier
    tensor = _gpu.CudaTensor(array, what, stream)
    if _copier is None:
        _copier = _gpu.HostCopier()
    copy = np.empty(tensor.shape, numpy_dtype(tensor.dtype))
    _copier.copy(tensor, copy, stream)
    return copy


def insert(
    sequence: Sequence,
    first_position: int,
    keys: CudaArray,
    values: CudaArray,
    stream: Stream,
    layers: Iterable[int] | None = None,
    layout: str = "NHD",
) -> None:
    """As sequence.insert, for tensors on a GPU: copied to the host behind what is queued in `stream`,
    then stored. Waits for both."""
    host_keys = _to_host(keys, "keys", stream)
    host_values = _to_host(values, "values", stream)
    sequence.insert(first_position, host_keys, host_values, layers, layout)
