"""Sessions and sequences: the calls an engine makes."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Sequence as SequenceOf
from types import TracebackType
from typing import Any, Protocol

from wavekv import _core
from wavekv.errors import NotFoundError, WaveKVError, from_status
from wavekv.types import (
    Attention,
    Budget,
    Estimation,
    IndexOptions,
    ModelShape,
    PlannedSegment,
    QueryResult,
    ResidentState,
    SegmentLabels,
    attention_from,
    estimation_from,
    query_from,
    resident_state_from,
)


class SupportsDLPack(Protocol):
    def __dlpack__(self, *args: Any, **kwargs: Any) -> Any: ...


# A numpy array (float32, float16, ml_dtypes.bfloat16) or anything that speaks DLPack on the CPU.
# Row-major arrays are read in place; others are copied into one first.
Array = Any | SupportsDLPack


def _core_budget(budget: Budget | None) -> _core.Budget | None:
    return None if budget is None else budget._to_core()


@dataclasses.dataclass(frozen=True)
class SessionInfo:
    """What the daemon said when the session attached."""

    tenant: str
    daemon_version: str
    epoch: int
    message_bytes_max: int
    tenant_bytes_max: int
    batch_max: int
    has_wave_buffer: bool
    shared_memory: bool
    """Whether inserts and steps go over shared memory now."""
    shared_memory_absent: str
    """If they do not: why."""


@dataclasses.dataclass(frozen=True)
class AttendItem:
    """One item of a batched step; arrays as in Sequence.attend."""

    sequence: Sequence
    layer: int
    queries: Array
    keys: Array | None = None
    values: Array | None = None
    budget: Budget | None = None
    exact: bool = False


class Sequence:
    """One request's KV cache. Made by Session.create_sequence; dropped when closed or collected.

    Thread-safe, but appends to one layer must be ordered by the caller.
    """

    def __init__(self, core: _core.Sequence, shape: ModelShape) -> None:
        self._handle: _core.Sequence | None = core
        self.shape = shape

    @property
    def _core(self) -> _core.Sequence:
        if self._handle is None:
            raise ValueError("the sequence is closed")
        return self._handle

    @property
    def id(self) -> int:
        return self._core.id

    @property
    def generation(self) -> int:
        """Counts truncations; every answer carries it."""
        return self._core.generation

    def token_count(self, layer: int = 0) -> int:
        """Returns how many positions of `layer` this object knows to be stored."""
        return self._core.token_count(layer)

    def insert(
        self,
        first_position: int,
        keys: Array,
        values: Array,
        layers: Iterable[int] | None = None,
        layout: str = "NHD",
    ) -> None:
        """Stores K and V of consecutive token positions. Safe to repeat.

        keys: [layers, tokens, kv_heads, key_dim] for layout "NHD", [layers, kv_heads, tokens,
        key_dim] for "HND", of the sequence's dtype; values likewise with value_dim. With one layer
        the leading axis may be left out. layers: which ones, in the order of the leading axis; all
        of them by default.

        Raises FailedPreconditionError on a gap (naming the expected position), AbortedError when
        other bytes are stored there, InvalidArgumentError for shapes, dtypes, NaN and infinities.
        """
        chosen = list(range(self.shape.layers) if layers is None else layers)
        self._core.insert(first_position, chosen, keys, values, layout)

    def build_index(self, progress: Callable[[int, int], None] | None = None) -> int:
        """Closes a prefill: clusters what is not yet and waits for it. Returns the index's version.

        progress is called with (tokens_done, tokens_total), summed over layers.
        """
        return self._core.build_index(progress)

    def plan_index(self, layer: int, token_count: int = 0) -> list[PlannedSegment]:
        """Returns where the daemon will cut the layer's index once it holds token_count tokens (0:
        those it holds) and build_index has come, as far as that is not planned yet: for who clusters
        keys by itself, as wavekv.gpu.KeyLabeller does."""
        return [PlannedSegment(*one) for one in self._core.plan_index(layer, token_count)]

    def give_labels(self, layer: int, segments: Iterable[SegmentLabels]) -> int:
        """Gives clusters of planned segments, in place of the daemon's k-means.

        They are used for segments that are cut later with exactly these tokens: give them before the
        rows, or the build_index, that let them be cut. Returns how many of them the daemon keeps;
        others do no harm. Raises InvalidArgumentError for a label that is none of the planned clusters.
        """
        return self._core.give_labels(
            layer, [(segment.first_position, segment.labels) for segment in segments]
        )

    def attend(
        self,
        layer: int,
        queries: Array,
        keys: Array | None = None,
        values: Array | None = None,
        *,
        budget: Budget | None = None,
        exact: bool = False,
    ) -> Attention:
        """Attends over the stored tokens of one layer, after appending a new token if it is given.

        queries [query_heads, key_dim], after RoPE. keys [kv_heads, key_dim] and values [kv_heads,
        value_dim] of the new token. exact=True reads every token.
        """
        return attention_from(
            self._core.attend(layer, queries, keys, values, _core_budget(budget), exact)
        )

    def attend_staged(
        self, layer: int, queries: Array, *, budget: Budget | None = None
    ) -> Attention:
        """As attend, through the wave buffer: the daemon stages the chosen rows there, this process
        attends over them. Needs create_sequence(wave_buffer=True)."""
        return attention_from(self._core.attend_staged(layer, queries, _core_budget(budget)))

    def query(
        self,
        layer: int,
        queries: Array,
        *,
        budget: Budget | None = None,
        inline_rows: bool = False,
    ) -> QueryResult:
        """Ranks the clusters for queries [query_heads, key_dim] and returns the plan; with
        inline_rows also the rows of the steady and retrieval zones."""
        return query_from(
            self._core.query(layer, queries, _core_budget(budget), inline_rows), self.shape
        )

    def estimate(
        self, layer: int, queries: Array, *, budget: Budget | None = None
    ) -> Estimation:
        """Returns the estimation zone for queries [query_heads, key_dim], with bounds of its mass."""
        return estimation_from(self._core.estimate(layer, queries, _core_budget(budget)))

    def attach_resident(
        self, *, cache_ratio: float = 0.0, ring_rows: int = 0
    ) -> _core.ResidentAttachment:
        """Gives the sequence a resident region in the wave buffer on a GPU, where this process
        attends over it and appends to it by itself: wavekv.gpu.ResidentBatch.open takes what is
        returned. Ends with detach_resident, or with this process.

        cache_ratio: of the payload of max_tokens, for the block cache (0: 0.05). ring_rows: exact
        tokens that the region holds, a multiple of 256 (0: 2304). Raises FailedPreconditionError
        with the cure (call build_index first; a wavebufferd --backend=cuda; not over TCP),
        AbortedError when it is attached, InvalidArgumentError for what no step on a GPU does,
        ResourceExhaustedError when the wave buffer has no room.
        """
        return self._core.attach_resident(cache_ratio, ring_rows)

    def resident_status(self, steady_first_above: int = 0, wait: float = 0.0) -> ResidentState:
        """Returns how the attached sequence is doing: once it has ended or its steady_first is above
        `steady_first_above`, or after `wait` seconds."""
        return resident_state_from(
            self._core.resident_status(steady_first_above, round(wait * 1000))
        )

    def detach_resident(self) -> None:
        """Ends the attachment once what steps have appended is stored. Wait for the stream first."""
        self._core.detach_resident()

    def fork(self, token_count: int = 0, max_tokens: int = 0, label: str = "") -> Sequence:
        """Returns a sequence that shares the first token_count tokens (0: all of them)."""
        return Sequence(self._core.fork(token_count, max_tokens, label), self.shape)

    def truncate(self, token_count: int) -> None:
        """Keeps the first token_count tokens of every layer; a new generation begins."""
        self._core.truncate(token_count)

    def pin(self, pinned: bool = True) -> None:
        """A pinned sequence outlives its client's lease and its TTL."""
        self._core.pin(pinned)

    def set_ttl(self, seconds: float) -> None:
        """Lets the sequence outlive its client for this long after its last use; 0: not at all."""
        self._core.set_ttl(round(seconds * 1000))

    def release(self) -> None:
        """Leaves the sequence with the daemon when this object goes (with pin or set_ttl)."""
        self._core.release()

    def close(self) -> None:
        """Drops the sequence. Closing twice is fine, and so is a sequence that is gone already."""
        if self._handle is not None:
            handle, self._handle = self._handle, None
            with contextlib.suppress(NotFoundError):
                handle.drop()

    def __enter__(self) -> Sequence:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            self.close()
        except WaveKVError:
            if error is None:  # The first error is the one to see.
                raise


class Session:
    """A client's lease with a daemon. Thread-safe."""

    def __init__(self, core: _core.Session) -> None:
        self._handle: _core.Session | None = core

    @property
    def _core(self) -> _core.Session:
        if self._handle is None:
            raise ValueError("the session is closed")
        return self._handle

    @property
    def info(self) -> SessionInfo:
        return SessionInfo(**self._core.info())

    def create_sequence(
        self,
        shape: ModelShape,
        max_tokens: int,
        *,
        index: IndexOptions | None = None,
        label: str = "",
        wave_buffer: bool = False,
        first_kv_head: int = 0,
        total_kv_heads: int = 0,
        logit_soft_cap: float = 0.0,
        sliding_window: int = 0,
    ) -> Sequence:
        """Makes a sequence; memory for max_tokens is reserved now or ResourceExhaustedError raised.

        wave_buffer: stage into, and cache blocks in, this tenant's wave buffer. first_kv_head and
        total_kv_heads say which heads of the model these are (tensor parallelism). logit_soft_cap
        and sliding_window are refused by the daemon unless 0.
        """
        options = _core.SequenceOptions()
        options.shape = shape._to_core()
        options.max_tokens = max_tokens
        options.label = label
        options.attach_wave_buffer = wave_buffer
        options.first_kv_head = first_kv_head
        options.total_kv_head_count = total_kv_heads
        options.logit_soft_cap = logit_soft_cap
        options.sliding_window = sliding_window
        (index or IndexOptions())._apply(options)
        return Sequence(self._core.create_sequence(options), shape)

    def attend_batch(self, items: SequenceOf[AttendItem]) -> list[Attention | WaveKVError]:
        """One round trip for many sequences. Returns a result, or the error, per item, in order."""
        replies = self._core.attend_batch(
            [
                (
                    item.sequence._core,
                    item.layer,
                    item.queries,
                    item.keys,
                    item.values,
                    _core_budget(item.budget),
                    item.exact,
                )
                for item in items
            ]
        )
        return [
            attention_from(reply) if isinstance(reply, dict) else from_status(*reply)
            for reply in replies
        ]

    def close(self) -> None:
        """Detaches; the sequences of this session go. Closing twice is fine."""
        self._handle = None

    def __enter__(self) -> Session:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def connect(
    address: str = "",
    *,
    token: str = "",
    client_name: str = "",
    deadline: float = 30.0,
    build_deadline: float = 600.0,
    lease: float = 0.0,
    shared_memory: bool = True,
) -> Session:
    """Attaches to the daemon at "unix:/path/to.sock" or "host:port". Times are in seconds.

    Without an address: $WAVEKV_ADDRESS, or where wavekvd listens by default.
    deadline bounds each call, build_deadline inserts and index builds; lease 0 is the daemon's
    default. Inserts and steps go over shared memory where the daemon offers it, unless shared_memory
    is False; SessionInfo says which way they take. Raises UnavailableError when nobody answers there.
    """
    return Session(
        _core.connect(
            address,
            token,
            client_name,
            round(deadline * 1000),
            round(build_deadline * 1000),
            round(lease * 1000),
            shared_memory,
        )
    )
