"""WaveKVCache: a transformers Cache whose keys and values are in WaveKV."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
import weakref
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from wavekv.errors import InvalidArgumentError
from wavekv.session import Sequence, Session, connect
from wavekv.transformers.captured import CapturedPass
from wavekv.transformers.full import FullAttention
from wavekv.transformers.models import UnsupportedModelError, model_shape, switch_tokens
from wavekv.transformers.rows import RowOptions
from wavekv.transformers.states import NOT_COMPILED, NewStates
from wavekv.transformers.store import Store
from wavekv.types import Budget, IndexOptions, StepCounters

# A pass of more tokens is a prompt's, one of fewer decodes (or verifies what an assistant guessed).
STEP_TOKENS_MAX = 32
# Of a sequence whose model does not say how long it may get.
_MAX_TOKENS = 8192
# Caches that transformers may drop by itself, see check_dropped.
_droppable: weakref.WeakSet[WaveKVCache] = weakref.WeakSet()


class WaveKVLayer(CacheLayerMixin):
    """One layer as transformers wants it: it counts tokens, and passes new ones on to attention."""

    is_sliding = False
    is_compileable = False
    is_croppable = True

    def __init__(self, store: Store, layer: int) -> None:
        super().__init__()
        self._store = store
        self._layer = layer
        self.is_initialized = True

    def lazy_initialization(self, *states: torch.Tensor) -> None:
        """Nothing to do: the daemon's sequences are made when the batch is known."""

    @torch.compiler.disable(reason=NOT_COMPILED)
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Takes new states [batch, kv_heads, n, dim]; returns them marked for the attention.

        transformers 4.57 passes a dict beside them, 5.x nothing: neither is needed.
        """
        self._store.begin(self._layer, key_states)
        return tuple(
            NewStates.wrap(states, self._store, self._layer)
            for states in (key_states, value_states)
        )

    def get_mask_sizes(self, query: torch.Tensor | int) -> tuple[int, int]:
        """Returns (columns, offset) of the mask; query is the new tokens' count, or positions."""
        new_columns = query if isinstance(query, int) else query.shape[0]
        return self.get_seq_length() + new_columns, 0

    def get_seq_length(self) -> int:
        return self._store.columns[self._layer]

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


class WaveKVCache(Cache):
    """The `past_key_values` of a model loaded with attn_implementation="wavekv".

    Each row of a batch is a sequence in the daemon, made at the first forward pass, given back when
    the cache is closed or collected. Padding at the left is not stored. While a prompt is read its
    keys and values are here, too, since it is attended exactly here; at the first generated token
    they go. A longer pass after that (the next message of a conversation) is attended exactly over
    the daemon's tokens. For one thread at a time, as any cache; several caches do not disturb each
    other.

    A daemon that fails is an exception (a WaveKVError that names it) within the deadline,
    and the cache is of no use any more. With fallback=True the keys and values stay here, which
    costs their memory, and the generation goes on with exact attention and a RuntimeWarning.
    """

    def __init__(
        self,
        config: Any,
        address: str = "",
        *,
        session: Session | None = None,
        max_tokens: int = 0,
        dtype: torch.dtype | None = None,
        budget: Budget | None = None,
        index: IndexOptions | None = None,
        fallback: bool = False,
        resident: bool | None = None,
        cache_ratio: float = 0.0,
        full_attention: str | int = "auto",
        deadline: float = 30.0,
        build_deadline: float = 600.0,
        step_tokens_max: int = STEP_TOKENS_MAX,
        label: str = "transformers",
    ) -> None:
        """Connects, and checks that model and daemon fit.

        config: the model's (model.config). address: the daemon's; where wavekvd listens by default
        if empty. session: a connection to use instead. max_tokens: the longest that a row may get,
        for which the daemon reserves memory; the model's context by default. dtype: of the model's
        keys and values, if its config does not say. budget: of the retrieval zone, the daemon's
        default if None. resident: take steps on the GPU, in the model's stream, where model and
        daemon are made for it; False: never, True: refuse the first step if that cannot be.
        cache_ratio: of the keys and values of max_tokens, how much a cache of blocks on the GPU
        holds while steps are taken there (0: 0.05). full_attention: up to how many tokens (of a row,
        padding included) keys and values stay here and are attended exactly, the daemon holding none:
        a count, "never", or "auto", which is on a GPU as many as exact attention is faster for
        (wavekv.full_attention_tokens_max) and a quarter of its memory holds, elsewhere none. deadline: seconds for one step of the daemon;
        build_deadline: for taking in a prompt's layer, and for clustering a prompt. step_tokens_max:
        a forward pass of more tokens belongs to a prompt.

        Raises UnsupportedModelError naming what the model has that WaveKV does not serve,
        InvalidArgumentError when it was loaded with another attention or full_attention is something
        else, UnavailableError when no
        daemon answers, and ResourceExhaustedError when it has no room for max_tokens.
        """
        shape = model_shape(config, dtype)
        attention = getattr(config, "_attn_implementation", None)
        if attention != "wavekv":
            raise InvalidArgumentError(
                f"the model's attention is {attention!r}, expected 'wavekv': load it with "
                "attn_implementation='wavekv'"
            )
        full = FullAttention(full_attention)
        text = config.get_text_config(decoder=True)
        index = index or IndexOptions()
        if budget is not None and index.budget is None:
            index = dataclasses.replace(index, budget=budget)  # For the steps on a GPU.
        options = RowOptions(
            max_tokens or getattr(text, "max_position_embeddings", 0) or _MAX_TOKENS,
            index, label, resident, deadline, cache_ratio,
        )  # fmt: skip
        session = session or connect(
            address, client_name="wavekv.transformers",
            deadline=deadline, build_deadline=build_deadline,
        )  # fmt: skip
        # Refused now, if it must be, and not at the first forward pass.
        session.create_sequence(shape, options.max_tokens, index=index, label=label).close()
        self._adopt(
            Store(
                session, address, shape, options,
                budget=budget, step_tokens_max=step_tokens_max, fallback=fallback,
                full_attention=full,
            ),
            text,
        )  # fmt: skip

    def _adopt(self, store: Store, config: Any) -> None:
        self._store = store
        self._config = config
        if switch_tokens(config) is not None:
            _droppable.add(self)
        super().__init__(
            layers=[WaveKVLayer(store, layer) for layer in range(store.shape.layers)]
        )

    def __bool__(self) -> bool:
        """False while nothing is stored, as of a DynamicCache: Phi-3 drops a cache that is true."""
        return self.get_seq_length() > 0

    @property
    def sequences(self) -> list[Sequence]:
        """The daemon's sequences, one a row; none before the first forward pass."""
        return self._store.rows.sequences if self._store.rows else []

    @property
    def counters(self) -> StepCounters:
        """What the daemon's steps have read so far."""
        return self._store.rows.counters if self._store.rows else StepCounters()

    @property
    def local_bytes(self) -> int:
        """Bytes of keys and values in this process: the prompt's until a token is generated, and a
        context's that full_attention or the fallback keeps here, with room for tokens to come."""
        return self._store.local_bytes

    @property
    def device_bytes(self) -> int:
        """Bytes of the wave buffer on a GPU that the cache holds: index copies, block caches and the
        newest tokens, while it steps there."""
        return self._store.rows.device_bytes if self._store.rows else 0

    @property
    def failure(self) -> Exception | None:
        """Why the daemon is used no more; None while it is."""
        return self._store.failure

    def capturing(self) -> contextlib.AbstractContextManager[CapturedPass]:
        """Inside it one pass of the model, of one token a row, goes into a CUDA graph, uncounted:

            with cache.capturing() as captured, torch.cuda.graph(graph):
                logits = model(token, position_ids=position, past_key_values=cache).logits

        Then `captured.advance()` before each `graph.replay()`. token and position [batch, 1] are
        tensors that the caller writes between replays; without position_ids the graph would repeat
        one position. No attention_mask: padding is known from the prompt. The rows must be on the
        GPU already, which they are after a prompt and one token without a graph, unless
        full_attention keeps the prompt here.

        Raises FailedPreconditionError when they are not, with fallback=True, and for anything else
        than that pass; UnsupportedModelError for a mask.
        """
        return self._store.capturing()

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row i what row beam_idx[i] was: forks in the daemon share what is stored."""
        self._store.select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows `indices`, in that order."""
        if indices.dtype == torch.bool:
            indices = indices.nonzero()[:, 0]
        self._store.select(indices.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        self._store.select([row for row in range(self._store.batch) for _ in range(repeats)])

    def crop(self, max_length: int) -> None:
        """Keeps the first max_length tokens; negative: removes as many; 0: nothing to remove."""
        # Assisted decoding hands over a tensor of one element.
        length = int(max_length)
        if length:
            self._store.crop(length if length > 0 else max(self.get_seq_length() + length, 0))

    def reset(self) -> None:
        """Gives the sequences back; the cache is as new."""
        self._store.close()

    def close(self) -> None:
        """Gives the sequences back now, and not when the cache is collected."""
        self._store.close()

    def fork(self, budget: Budget | None = None) -> WaveKVCache:
        """Returns a cache of its own that shares what is stored: a prompt to go on from twice.

        budget: of its retrieval zone; this cache's if None.
        """
        store = self._store.fork()
        store.budget = budget or store.budget
        copy = object.__new__(WaveKVCache)
        copy._adopt(store, self._config)
        return copy

    def __deepcopy__(self, memo: dict[int, Any]) -> WaveKVCache:
        return self.fork()


def check_dropped(config: Any, columns: int, positions: torch.Tensor | None) -> None:
    """Called when attention gets keys from another cache: is it because WaveKV's was dropped?

    config: the model's; columns: how many keys there are; positions: of the queries, where known.

    Warns, once, when transformers reads all tokens again. Raises UnsupportedModelError when it
    (5.17 does) goes on with the newest token alone: its attention would be over nothing else.
    """
    limit = switch_tokens(config) if _droppable else None
    for cache in list(_droppable):
        if cache._config is not config or not 0 < cache.get_seq_length() <= limit:
            continue
        lost = positions is not None and limit <= int(positions.max()) and columns <= limit
        if not lost and columns <= limit:
            continue  # Another sequence of the same model, in a cache of its own.
        _droppable.discard(cache)
        text = (
            f"beyond {limit} tokens this model rotates its keys by other factors: transformers "
            f"dropped the WaveKVCache of {cache.get_seq_length()} tokens"
        )
        cure = f"a prompt of more than {limit} tokens is served by WaveKV to its end"
        if lost:
            raise UnsupportedModelError(f"{text} and attends over the newest {columns} alone; {cure}")
        warnings.warn(
            f"{text} and reads all again, into a cache of its own; {cure}",
            RuntimeWarning,
            stacklevel=2,
        )
