"""Client of WaveKV, a vector storage engine for the KV cache of language models.

    import wavekv

    with wavekv.connect("unix:/run/wavekv/wavekvd.sock") as session:
        shape = wavekv.ModelShape(layers=32, query_heads=32, kv_heads=8, key_dim=128)
        with session.create_sequence(shape, max_tokens=131072) as sequence:
            sequence.insert(0, keys, values)   # prefill, [layers, tokens, kv_heads, dim]
            sequence.build_index()
            step = sequence.attend(layer, q, k, v)  # decode: append k, v and attend
"""

from wavekv._core import __version__
from wavekv.choice import AttentionCost, estimate_attention, full_attention_tokens_max
from wavekv.errors import (
    AbortedError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ResourceExhaustedError,
    UnauthenticatedError,
    UnavailableError,
    UnimplementedError,
    WaveKVError,
)
from wavekv.session import AttendItem, Sequence, Session, SessionInfo, connect
from wavekv.types import (
    Attention,
    Budget,
    Estimation,
    HeadZones,
    IndexOptions,
    ModelShape,
    PlannedSegment,
    QueryResult,
    ResidentState,
    RetrievedCluster,
    SegmentLabels,
    StepCounters,
    numpy_dtype,
)

__all__ = [
    "AbortedError",
    "AttendItem",
    "Attention",
    "AttentionCost",
    "Budget",
    "DeadlineExceededError",
    "Estimation",
    "FailedPreconditionError",
    "HeadZones",
    "IndexOptions",
    "InvalidArgumentError",
    "ModelShape",
    "NotFoundError",
    "PlannedSegment",
    "QueryResult",
    "ResidentState",
    "ResourceExhaustedError",
    "RetrievedCluster",
    "SegmentLabels",
    "Sequence",
    "Session",
    "SessionInfo",
    "StepCounters",
    "UnauthenticatedError",
    "UnavailableError",
    "UnimplementedError",
    "WaveKVError",
    "__version__",
    "connect",
    "estimate_attention",
    "full_attention_tokens_max",
    "numpy_dtype",
]
