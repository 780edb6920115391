"""Values of the SDK: shapes, budgets, results."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from wavekv import _core
from wavekv.errors import WaveKVError, from_status

_DTYPES = {"f32": _core.DType.f32, "f16": _core.DType.f16, "bf16": _core.DType.bf16}


@dataclasses.dataclass(frozen=True)
class ModelShape:
    """The attention geometry of a model.

    dtype is that of the stored keys and values: "f32", "f16" or "bf16".
    value_dim defaults to key_dim; softmax_scale (multiplies q.k) to 1 / sqrt(key_dim).
    model_id names the weights and the RoPE variant.
    """

    layers: int
    query_heads: int
    kv_heads: int
    key_dim: int
    value_dim: int = 0
    dtype: str = "bf16"
    softmax_scale: float = 0.0
    model_id: str = ""

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES:
            raise ValueError(f"dtype is {self.dtype!r}, expected one of {sorted(_DTYPES)}")
        if not self.value_dim:
            object.__setattr__(self, "value_dim", self.key_dim)
        if not self.softmax_scale:
            object.__setattr__(self, "softmax_scale", 1.0 / math.sqrt(self.key_dim))

    def _to_core(self) -> _core.ModelShape:
        core = _core.ModelShape()
        core.layer_count = self.layers
        core.query_head_count = self.query_heads
        core.kv_head_count = self.kv_heads
        core.key_dim = self.key_dim
        core.value_dim = self.value_dim
        core.dtype = _DTYPES[self.dtype]
        core.softmax_scale = self.softmax_scale
        core.model_id = self.model_id
        return core


@dataclasses.dataclass(frozen=True)
class Budget:
    """How many clusters the retrieval zone of a KV head gets, and how much of the rest is estimated.

    kind: "ratio" (share of the clusters), "clusters" (a count), "coverage" (fewest clusters with
    this share of the estimated mass), "error" (retrieve until the error bound is under the value).
    clusters_max caps coverage and error (0: 1/8 of the clusters). estimate_ratio is the share of
    the clusters not retrieved that is estimated; what is beyond it is ignored, and counted. The
    best sketch_clusters (at most 4096) of the estimated are estimated token by token.
    """

    kind: str = "ratio"
    value: float = 0.005
    clusters_max: int = 0
    estimate_ratio: float = 1.0
    sketch_clusters: int = 112

    @classmethod
    def ratio(cls, share: float) -> Budget:
        return cls("ratio", share)

    @classmethod
    def clusters(cls, count: int) -> Budget:
        return cls("clusters", count)

    @classmethod
    def coverage(cls, share: float) -> Budget:
        return cls("coverage", share)

    @classmethod
    def error(cls, epsilon: float) -> Budget:
        return cls("error", epsilon)

    @classmethod
    def steady_only(cls) -> Budget:
        """Nothing retrieved, nothing estimated: the steady zone alone."""
        return cls("clusters", 0, 0, 0.0)

    def _to_core(self) -> _core.Budget:
        core = _core.Budget()
        try:
            core.kind = getattr(_core.Budget.Kind, self.kind)
        except AttributeError:
            raise ValueError(
                f"budget kind is {self.kind!r}, expected ratio, clusters, coverage or error"
            ) from None
        core.value = self.value
        core.clusters_max = self.clusters_max
        core.sketch_clusters = self.sketch_clusters
        core.estimate_ratio = self.estimate_ratio
        return core


@dataclasses.dataclass(frozen=True)
class IndexOptions:
    """How a sequence is indexed; zeros are the daemon's defaults (8192, 1024, 16, 10).

    sketch: keep every clustered token in 4 bits a dim, for finer estimates; it takes about a
    quarter of the token's 16-bit size.
    """

    segment_tokens: int = 0
    small_segment_tokens: int = 0
    tokens_per_cluster: int = 0
    kmeans_iterations: int = 0
    budget: Budget | None = None
    layer_budgets: dict[int, Budget] = dataclasses.field(default_factory=dict)
    dense_layers: tuple[int, ...] = ()
    sketch: bool = True

    def _apply(self, options: _core.SequenceOptions) -> None:
        options.set_index(
            self.segment_tokens,
            self.small_segment_tokens,
            self.tokens_per_cluster,
            self.kmeans_iterations,
            self.budget._to_core() if self.budget else None,
            [(layer, budget._to_core()) for layer, budget in self.layer_budgets.items()],
            list(self.dense_layers),
            self.sketch,
        )


@dataclasses.dataclass(frozen=True)
class PlannedSegment:
    """A segment that the daemon will cut, and how many clusters its k-means would look for."""

    first_position: int
    tokens: int
    clusters: int


@dataclasses.dataclass(frozen=True, eq=False)
class SegmentLabels:
    """Which cluster each token of a planned segment belongs to: labels [kv_heads, tokens] uint16."""

    first_position: int
    labels: np.ndarray


@dataclasses.dataclass
class StepCounters:
    """What a step read and how it was planned, summed over KV heads. Add them up over steps."""

    steady_tokens: int = 0
    retrieved_clusters: int = 0
    retrieved_tokens: int = 0
    estimated_clusters: int = 0
    sketched_clusters: int = 0
    ignored_clusters: int = 0
    moved_to_estimation: int = 0
    kv_bytes_read: int = 0
    kv_bytes_full: int = 0
    cache_hit_blocks: int = 0
    cache_miss_blocks: int = 0
    error_budget_met: int = 0
    error_budget_capped: int = 0

    def __iadd__(self, other: StepCounters) -> StepCounters:
        for field in dataclasses.fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))
        return self

    @property
    def kv_bytes_read_ratio(self) -> float:
        """Bytes read (centroids, value means, steady and retrieved rows) over those of exact attention."""
        return self.kv_bytes_read / self.kv_bytes_full if self.kv_bytes_full else 0.0

    @property
    def hit_ratio(self) -> float:
        """Share of the blocks asked of the block cache that were in it; 0 without a wave buffer."""
        asked = self.cache_hit_blocks + self.cache_miss_blocks
        return self.cache_hit_blocks / asked if asked else 0.0


@dataclasses.dataclass(frozen=True)
class Attention:
    """out [query_heads, value_dim] float32, lse [query_heads] float32 (natural log; -inf over nothing)."""

    out: np.ndarray
    lse: np.ndarray
    generation: int
    version: int
    token_count: int
    counters: StepCounters


@dataclasses.dataclass(frozen=True)
class Estimation:
    """The estimation zone: out [query_heads, value_dim], lse [query_heads], bounds of its true log mass."""

    out: np.ndarray
    lse: np.ndarray
    lse_lower: np.ndarray
    lse_upper: np.ndarray
    generation: int
    version: int
    counters: StepCounters


@dataclasses.dataclass(frozen=True)
class RetrievedCluster:
    """A cluster of the retrieval zone, and the log of the group's estimated mass share."""

    segment_idx: int
    cluster_idx: int
    size: int
    estimated_mass: float


@dataclasses.dataclass(frozen=True)
class HeadZones:
    """What a query chose for one KV head. keys [rows, key_dim] and values [rows, value_dim] (steady
    rows first) with their token positions, when the query asked for inline rows; else None."""

    kv_head: int
    steady_tokens: int
    retrieved: list[RetrievedCluster]
    staged_rows: int
    keys: np.ndarray | None
    values: np.ndarray | None
    positions: np.ndarray | None


@dataclasses.dataclass(frozen=True)
class QueryResult:
    """The plan of one step, and the estimation zone's part of its answer."""

    heads: list[HeadZones]
    estimation: Estimation
    generation: int
    version: int
    token_count: int
    step: int
    counters: StepCounters


@dataclasses.dataclass(frozen=True)
class ResidentState:
    """How a sequence that is attached to a resident region is doing.

    ended: None, or why it is not attached any more. token_count: stored by every layer.
    steady_first: positions before it are clustered, and their rows of the ring are free.
    """

    ended: WaveKVError | None
    token_count: int
    steady_first: int
    hit_blocks: int
    miss_blocks: int
    overflows: int
    violations: int


def numpy_dtype(name: str) -> np.dtype:
    """Returns the numpy dtype of "f32", "f16" or "bf16"."""
    if name == "bf16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype({"f32": np.float32, "f16": np.float16}[name])


def attention_from(reply: dict[str, Any]) -> Attention:
    return Attention(**{**reply, "counters": StepCounters(**reply["counters"])})


def resident_state_from(reply: dict[str, Any]) -> ResidentState:
    ended = reply["ended"]
    return ResidentState(**{**reply, "ended": ended and from_status(*ended)})


def estimation_from(reply: dict[str, Any]) -> Estimation:
    return Estimation(**{**reply, "counters": StepCounters(**reply["counters"])})


def query_from(reply: dict[str, Any], shape: ModelShape) -> QueryResult:
    dtype = numpy_dtype(shape.dtype)
    heads = []
    for head in reply["heads"]:
        rows = len(head["inline_positions"])
        heads.append(
            HeadZones(
                kv_head=head["kv_head"],
                steady_tokens=head["steady_tokens"],
                retrieved=[RetrievedCluster(*cluster) for cluster in head["retrieved"]],
                staged_rows=head["staged_rows"],
                keys=np.frombuffer(head["inline_keys"], dtype).reshape(rows, shape.key_dim)
                if rows
                else None,
                values=np.frombuffer(head["inline_values"], dtype).reshape(rows, shape.value_dim)
                if rows
                else None,
                positions=np.asarray(head["inline_positions"], np.int64) if rows else None,
            )
        )
    return QueryResult(
        heads=heads,
        estimation=estimation_from(reply["estimation"]),
        generation=reply["generation"],
        version=reply["version"],
        token_count=reply["token_count"],
        step=reply["step"],
        counters=StepCounters(**reply["counters"]),
    )
