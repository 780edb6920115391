"""Where the keys and values of a batch are, and which attention a forward pass gets."""

from __future__ import annotations

import contextlib
import enum
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch

from wavekv.errors import FailedPreconditionError, WaveKVError, from_status
from wavekv.session import Session
from wavekv.transformers.captured import CapturedPass
from wavekv.transformers.full import FullAttention
from wavekv.transformers.kept import KeptStates, States
from wavekv.transformers.masks import first_columns
from wavekv.transformers.models import UnsupportedModelError, dtype_name
from wavekv.transformers.resident import LostStepError
from wavekv.transformers.rows import TOKENS_BEFORE_ATTACHING, RowOptions, Rows
from wavekv.types import Budget, ModelShape


class Way(enum.Enum):
    """How a forward pass attends."""

    HERE = "here"  # Exactly, here, where that is the faster way; the daemon has nothing yet.
    PREFILL = "prefill"  # Exactly, here, over keys and values that are still here, and stored.
    STEP = "step"  # In the daemon, a token or a few at a time.
    EXTEND = "extend"  # In the daemon exactly, and here over the new tokens: many, after a step.


class Store:
    """The state behind a WaveKVCache: counts, the prefill's tensors, the daemon's rows.

    A column is a place in the batch, padding included; all rows have the same columns. One forward
    pass at a time: as any transformers cache, not for several threads.

    Attributes:
      columns: of each layer, the pass under way included.
      budget: of the retrieval zone; None is the daemon's default.
      failure: why the daemon is used no more; None while it is.
    """

    def __init__(
        self,
        session: Session,
        address: str,
        shape: ModelShape,
        options: RowOptions,
        *,
        budget: Budget | None,
        step_tokens_max: int,
        fallback: bool,
        full_attention: FullAttention,
    ) -> None:
        self.session = session
        self.shape = shape
        self.columns = [0] * shape.layers
        self.budget = budget
        self.failure: WaveKVError | None = None
        self.rows: Rows | None = None
        self._address = address or "its default address"
        self._options = options
        self._step_tokens_max = step_tokens_max
        self._fallback = fallback
        self._full_attention = full_attention
        self._here_alone = True  # The daemon has been told nothing yet.
        # Keys and values of each layer; None once given up.
        self._here: list[KeptStates] | None = self._nothing_kept()
        self._way = Way.PREFILL
        self._columns_here = 0  # Up to how many a pass is attended exactly here.
        self._stepped = False  # The prompt is over: tokens are generated.
        self._short_passes = 0
        self._build_due = False
        self._mask: weakref.ref[torch.Tensor] | None = None
        self._first: list[int] = []
        self._capturing: CapturedPass | None = None

    @property
    def batch(self) -> int:
        """Rows of the batch; 0 before the first pass."""
        if self.rows is not None:
            return len(self.rows)
        return self._here[0].batch if self._here else 0

    @property
    def local_bytes(self) -> int:
        """Bytes of keys and values that this process holds."""
        return sum(kept.nbytes for kept in self._here or ())

    def begin(self, layer: int, keys: torch.Tensor) -> None:
        """Counts a layer's new tokens, keys [batch, kv_heads, n, dim]; the first layer's decide how
        the whole pass attends."""
        new_columns = keys.shape[2]
        if self._capturing is not None:
            self._capturing.begin(layer, new_columns)
            return
        self._refuse_lost()
        if layer == 0:
            if len(set(self.columns)) > 1:
                raise FailedPreconditionError(
                    "an earlier pass of the model broke off between two layers: crop the cache to "
                    f"the {min(self.columns)} tokens that all have, or reset it"
                )
            self._mask, self._first = None, []
            self._columns_here = self._most_here(keys)
            self._way = self._choose(new_columns)
        self.columns[layer] += new_columns

    def attend(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
        exact: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
    ) -> torch.Tensor:
        """Attends for one layer of the pass, and stores its new tokens.

        query [batch, query_heads, n, dim]; keys and values [batch, kv_heads, n, dim]; mask as
        transformers made it. exact(keys, values) is this process's own attention over what it is
        given. Returns [batch, n, query_heads, value_dim] of the query's dtype.
        """
        if self._capturing is not None:
            self._check_layer(layer, query, keys, scaling)
            return self._capturing.attend(layer, query, keys, values, mask).transpose(1, 2)
        everything = self._keep(layer, keys, values)
        if self.failure is None:
            try:
                self._ready(layer, query, keys, mask, scaling)
                answer = self._through_daemon(layer, query, keys, values)
                if answer is not None:
                    return answer.transpose(1, 2).to(query.device, query.dtype)
            except UnsupportedModelError:
                raise  # The caller's doing, not the daemon's.
            except LostStepError as error:
                self._fallback = False  # What is here was made of a wrong token.
                self.lose(error, f"in layer {layer}")
            except WaveKVError as error:
                self.lose(error, f"in layer {layer}")
        assert everything is not None  # A prefill, or kept for the fallback.
        return exact(*everything)

    @contextlib.contextmanager
    def capturing(self) -> Iterator[CapturedPass]:
        """The pass inside goes into a CUDA graph: see WaveKVCache.capturing."""
        self._refuse_in_capture("capturing()")
        self._refuse_lost()
        if self._fallback:
            raise FailedPreconditionError(
                "with fallback=True each pass keeps its keys and values, which no graph can: make "
                "the cache without it"
            )
        self._refuse_here()
        steps = self.rows.resident if self.rows else None
        if steps is None:
            raise FailedPreconditionError(
                "steps are not on the GPU: take a token after the prompt without a graph, then "
                f"capture{self._unless_here()}. WaveKVCache(..., resident=True) says why they cannot be"
            )
        self._capturing = captured = CapturedPass(steps, self.shape.layers, self._advance)
        try:
            yield captured
            captured.finish()
        finally:
            self._capturing = None
            captured.end()

    def select(self, sources: list[int]) -> None:
        """Makes row i of the batch what row sources[i] was."""
        self._refuse_in_capture("reordering the batch")
        if sources == list(range(self.batch)):
            return
        for kept in self._here or ():
            kept.select(sources)
        self._tell("reordering the batch", lambda rows: rows.select(sources))

    def crop(self, columns: int) -> None:
        """Forgets all but the first `columns` columns."""
        self._refuse_in_capture("crop()")
        if columns >= self.columns[0]:
            return
        self.columns = [columns] * self.shape.layers
        for kept in self._here or ():
            kept.crop(columns)
        self._tell("truncating", lambda rows: rows.truncate(columns))

    def fork(self) -> Store:
        """Returns a store of its own that shares what is stored so far."""
        self._refuse_in_capture("fork()")
        copy = object.__new__(Store)
        copy.__dict__.update(self.__dict__)
        copy.columns = list(self.columns)
        copy._here = None if self._here is None else [kept.fork() for kept in self._here]
        copy._mask, copy._first = None, []
        copy.rows = None
        if self.rows is not None and self.failure is None:
            copy.rows = self.rows.fork()
        return copy

    def close(self) -> None:
        """Gives the rows back; the store is as new."""
        self._refuse_in_capture("close()")
        if self.rows is not None:
            self.rows.close()
        self.rows = None
        self._here, self._here_alone = self._nothing_kept(), True
        self.columns = [0] * self.shape.layers
        self._stepped, self._short_passes, self._build_due = False, 0, False
        self.failure = None

    def lose(self, error: WaveKVError, when: str) -> None:
        """Notes that the daemon failed: an exception, or with the fallback a warning."""
        # Without its traceback, whose frames would keep the rows from being collected.
        self.failure = from_status(error.code, str(error))
        text = f"WaveKV's daemon at {self._address} failed {when}: {error}"
        if not self._fallback:
            raise from_status(error.code, text) from error
        warnings.warn(f"{text}. Going on with exact attention here.", RuntimeWarning, stacklevel=2)
        # Collected, not closed: a daemon that is stopped would cost a deadline for each row.
        self.rows = None

    def _refuse_lost(self) -> None:
        if self.failure is not None and not self._fallback:
            raise FailedPreconditionError(
                f"this WaveKVCache lost the daemon at {self._address} in an earlier call "
                f"({self.failure}); make a new one"
            )

    def _refuse_in_capture(self, what: str) -> None:
        if self._capturing is not None:
            raise FailedPreconditionError(
                f"{what} inside capturing(), expected one pass of the model and nothing else"
            )

    def _refuse_here(self) -> None:
        if self._here_alone and self.columns[0]:
            raise FailedPreconditionError(
                f"{self.columns[0]} tokens are attended exactly here, since that is faster, and a graph "
                "would go on over the tokens of its capture alone: make the cache with "
                "full_attention='never' to capture"
            )

    def _unless_here(self) -> str:
        """What advice to capture after a prompt leaves out."""
        if self._full_attention.never:
            return ""
        return " (of a cache made with full_attention='never': this one may attend a prompt here)"

    def _advance(self, captured: CapturedPass) -> None:
        """Counts the token that the next replay of the graph appends."""
        self._refuse_in_capture("advance()")
        self._refuse_lost()
        if not captured.complete:
            raise FailedPreconditionError("advance() of a pass whose capture failed")
        steps = self.rows.resident if self.rows else None
        if self.rows is None:
            raise FailedPreconditionError(
                "steps are not on the GPU any more: the cache was reset or closed, and the graph knows "
                "the rows that it had. Capture another after the next prompt and a token without a "
                f"graph{self._unless_here()}"
            )
        if steps is None:
            self._refuse_here()
            raise FailedPreconditionError(
                "steps are not on the GPU any more: a pass of several tokens, crop, reordering and fork "
                "end them. The next prompt and a token without a graph after it bring them back, or "
                f"{TOKENS_BEFORE_ATTACHING + 1} tokens without a graph"
            )
        if steps.batch is not captured.batch:
            raise FailedPreconditionError(
                "the graph was captured for other rows: reset, or rows that were added or removed, "
                "came between. Capture again"
            )
        try:
            steps.reserve()
        except WaveKVError as error:
            self.lose(error, "before a replay")
        self.columns = [columns + 1 for columns in self.columns]

    def _nothing_kept(self) -> list[KeptStates]:
        return [KeptStates() for _ in range(self.shape.layers)]

    def _most_here(self, keys: torch.Tensor) -> int:
        """Returns up to how many columns a batch of these is attended exactly here."""
        if not self._here_alone:
            return 0
        return self._full_attention.columns_max(self.shape, keys, self._options.max_tokens)

    def _choose(self, new_columns: int) -> Way:
        past = self.columns[0]
        short = new_columns <= self._step_tokens_max
        if not self._stepped and past and short:
            # A prompt fed in chunks may end in one short chunk; a second one is decoding.
            self._short_passes += 1
            self._stepped = new_columns == 1 or self._short_passes > 1
            self._build_due = self._stepped
        if self.failure is not None:
            return Way.PREFILL
        if past + new_columns <= self._columns_here:
            return Way.HERE
        if self._here_alone:
            # Until all of it is there: who is interrupted can do it again.
            self._tell("taking over what was attended here", self._hand_over)
            self._here_alone = False
            if self.failure is not None:
                return Way.PREFILL
        if not self._stepped:
            return Way.PREFILL
        if not short:
            self._build_due = True
            return Way.EXTEND if self._here is None else Way.PREFILL
        if not self._fallback:
            self._here = None
        if self._build_due:
            self._build_due = False
            self._tell("building the index", lambda rows: rows.build_index())
        return Way.STEP

    def _hand_over(self, rows: Rows) -> None:
        """Stores what is here alone."""
        for layer, kept in enumerate(self._here or ()):
            rows.label(layer, kept.states[0])
            rows.insert(layer, 0, *kept.states)

    def _tell(self, what: str, call: Callable[[Rows], Any]) -> None:
        if self.rows is None:
            return
        try:
            call(self.rows)
        except WaveKVError as error:
            self.lose(error, what)

    def _keep(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> States | None:
        if self._here is None:
            return None
        return self._here[layer].append(keys, values, self._room_up_to(keys.shape[2]))

    def _room_up_to(self, new_columns: int) -> int:
        """Returns up to how many columns there may be room behind those of the pass: as many as the
        states may come to have here. 0 while a prompt is read, its last chunk included: it is as long
        as it is, and given up, or copied once, at the first token."""
        if not self._stepped or new_columns > self._step_tokens_max:
            return 0
        return self._options.max_tokens if self._fallback else self._columns_here

    def _check_layer(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, scaling: float | None
    ) -> None:
        """Checks that the layer is what the rows were made for."""
        shape = self.shape
        found = (query.shape[1], keys.shape[1], keys.shape[3])
        expected = (shape.query_heads, shape.kv_heads, shape.key_dim)
        if found != expected:
            raise UnsupportedModelError(
                f"layer {layer} has (query heads, KV heads, head dim) {found}, expected {expected} "
                "as the cache's config says"
            )
        if scaling is not None and not math.isclose(scaling, shape.softmax_scale, rel_tol=1e-6):
            raise UnsupportedModelError(
                f"layer {layer} scales its logits by {scaling}, expected {shape.softmax_scale}"
            )
        if dtype_name(keys.dtype) != shape.dtype:
            raise UnsupportedModelError(
                f"layer {layer} makes keys of {keys.dtype}, expected {shape.dtype}: say "
                f"WaveKVCache(..., dtype={keys.dtype})"
            )
        if self.rows is not None and len(self.rows) != len(keys):
            raise ValueError(
                f"batch of {len(keys)}, expected {len(self.rows)}: that many rows are stored"
            )

    def _ready(
        self,
        layer: int,
        query: torch.Tensor,
        keys: torch.Tensor,
        mask: torch.Tensor | None,
        scaling: float | None,
    ) -> None:
        """Makes the rows at the first layer, and notes where they begin."""
        self._check_layer(layer, query, keys, scaling)
        if self.rows is None:
            self.rows = Rows(self.session, self.shape, self._options, len(keys))
        seen = self._mask() if self._mask else None
        if layer == 0 or seen is not mask:  # One mask for all layers is checked once.
            batch, _, new_columns, _ = keys.shape
            columns = self.columns[layer]
            self._first = first_columns(mask, batch, new_columns, columns)
            self._mask = None if mask is None else weakref.ref(mask)
            self.rows.set_padding(self._first, columns - new_columns)

    def _through_daemon(
        self, layer: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor | None:
        """Stores the new tokens. Returns [batch, query_heads, n, value_dim]; None if it is for this
        process to attend."""
        assert self.rows is not None
        if self._way is Way.HERE:
            return None
        new_columns = keys.shape[2]
        past = self.columns[layer] - new_columns
        if self._way is Way.PREFILL:
            if self._here is not None:
                self.rows.label(layer, self._here[layer].states[0])
            self.rows.insert(layer, past, keys, values)
            return None
        if new_columns == 1 and max(self._first) < past:
            return self.rows.step(layer, query, keys, values, self.budget)
        exact = self._way is Way.EXTEND
        before = self.rows.past(layer, query, None if exact else self.budget, exact)
        self.rows.insert(layer, past, keys, values)
        among = attend_among(
            query, keys, values, [max(first - past, 0) for first in self._first],
            self.shape.softmax_scale,
        )  # fmt: skip
        return merge(before, among)


def attend_among(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    first: list[int],
    scale: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention among new tokens alone, in float32 on the CPU.

    query [batch, query_heads, n, dim], keys and values [batch, kv_heads, n, dim]; first[row]: how
    many of them are padding at the row's left. Returns out [batch, query_heads, n, value_dim] and
    lse [batch, query_heads, n]; over nothing out = 0, lse = -inf.
    """
    batch, heads, n, _ = query.shape
    group = heads // keys.shape[1]
    q, k, v = (states.detach().to("cpu", torch.float32) for states in (query, keys, values))
    grouped = q.reshape(batch, -1, group, n, q.shape[-1])
    logits = scale * grouped @ k[:, :, None].transpose(-1, -2)
    place = torch.arange(n)
    seen = (place <= place[:, None]) & (place >= torch.tensor(first)[:, None, None])
    logits = logits.masked_fill(~seen[:, None, None], -torch.inf)
    lse = torch.logsumexp(logits, dim=-1)
    weights = torch.exp(logits - lse.clamp_min(torch.finfo(lse.dtype).min)[..., None])
    out = weights @ v[:, :, None]
    return out.reshape(batch, heads, n, -1), lse.reshape(batch, heads, n)


def merge(
    one: tuple[torch.Tensor, torch.Tensor], other: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """Merges two attentions over different tokens: out [..., value_dim], lse [...]."""
    lse = torch.logaddexp(one[1], other[1]).clamp_min(torch.finfo(torch.float32).min)
    return sum(out * torch.exp(part - lse)[..., None] for out, part in (one, other))
