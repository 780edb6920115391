"""The daemon's half of a cache: one sequence for each row of the batch."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from typing import Any

import torch

from wavekv.errors import WaveKVError
from wavekv.session import AttendItem, Sequence, Session
from wavekv.transformers.labels import PromptLabels
from wavekv.transformers.resident import LostStepError, ResidentSteps, on_gpu, try_resident
from wavekv.types import Attention, Budget, IndexOptions, ModelShape, StepCounters

# Single tokens, one after the other, before rows that have left the GPU for anything else are attached
# again: that copies the index and begins with an empty block cache, which a few steps do not pay for.
TOKENS_BEFORE_ATTACHING = 16


@dataclasses.dataclass(frozen=True)
class RowOptions:
    """What each row's sequence is made with."""

    max_tokens: int
    index: IndexOptions | None = None
    label: str = ""
    resident: bool | None = None  # Steps on the GPU: where it can be, if None; else an error.
    deadline: float = 30.0  # Seconds that a step on the GPU may wait for the daemon's index.
    cache_ratio: float = 0.0  # Of the payload, for a block cache on the GPU; 0: the daemon's default.


class Rows:
    """The sequences of a batch, and how many columns of padding each row has at its left.

    A row's padding is not stored: column c of the batch is token position c - padding of the row.

    On a GPU the sequences are attached at the first single token after a prompt, and steps are
    taken in the model's stream. Whatever else is asked of them ends that, until the next prompt or
    until some single tokens have followed each other: an engine that forks or verifies several tokens
    all the time would do little but attach.
    Errors of the daemon (WaveKVError) pass through; what it has stored then is not known.

    Attributes:
      counters: what all steps have read.
    """

    def __init__(
        self, session: Session, shape: ModelShape, options: RowOptions, batch: int
    ) -> None:
        self._session = session
        self._shape = shape
        self._options = options
        self._padding = [0] * batch
        self._sequences = [self._create() for _ in range(batch)]
        self._resident: ResidentSteps | None = None
        # Of the last steps on the GPU, and of the next if a graph keeps it.
        self._batch: weakref.ref[Any] | None = None
        # Single tokens that come one after the other before they are attached; None: they are not.
        self._attach_after: int | None = None
        self._tokens_alone = 0  # That have come.
        self._labels: PromptLabels | None = None
        self.counters = StepCounters()

    def __len__(self) -> int:
        return len(self._sequences)

    @property
    def sequences(self) -> list[Sequence]:
        return list(self._sequences)

    @property
    def device_bytes(self) -> int:
        """Bytes of GPU memory that the rows hold."""
        return self._resident.region_bytes if self._resident else 0

    @property
    def resident(self) -> ResidentSteps | None:
        """The steps on the GPU, while the rows are attached there."""
        return self._resident

    def set_padding(self, first_columns: list[int], past_columns: int) -> None:
        """Notes where each row's tokens begin; RuntimeError if that contradicts what is stored.

        Called once in each forward pass, before anything of it is stored. A row whose padding
        reaches `past_columns` and beyond has no tokens yet.
        """
        for row, first in enumerate(first_columns):
            known = self._padding[row]
            if first != known and min(first, known) < past_columns:
                raise RuntimeError(
                    f"row {row} of the batch began at column {known} and now begins at {first}: "
                    "the attention mask of earlier tokens must stay as it was"
                )
        self._padding = list(first_columns)

    def insert(
        self, layer: int, past_columns: int, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        """Stores new columns of a layer: keys [batch, kv_heads, columns, dim], values likewise."""
        self._leave()
        columns = keys.shape[2]
        keys, values = _host(keys), _host(values)
        for row, sequence in enumerate(self._sequences):
            skipped = max(self._padding[row] - past_columns, 0)
            if skipped >= columns:
                continue
            sequence.insert(
                past_columns + skipped - self._padding[row],
                keys[row, :, skipped:].contiguous(),
                values[row, :, skipped:].contiguous(),
                layers=[layer],
                layout="HND",
            )

    def label(self, layer: int, keys: torch.Tensor) -> None:
        """Clusters a prompt's keys where they are, if that is a GPU, for the index that the daemon
        will build of them: before the newest are inserted. keys [batch, kv_heads, columns, dim] of
        all columns so far."""
        if self._labels is None:
            self._labels = PromptLabels(self._shape, keys.device)
        self._labels.give(layer, self._sequences, self._padding, keys)

    def build_index(self) -> None:
        """Closes a prefill: clusters what is not yet, row after row, and waits for it."""
        self._leave()
        for sequence in self._sequences:
            if sequence.token_count():
                sequence.build_index()
        self._attach_after = None if self._options.resident is False else 0

    def step(
        self,
        layer: int,
        queries: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        budget: Budget | None,
    ) -> torch.Tensor:
        """Appends one token to each row and attends: one round trip for the batch, or none.

        queries [batch, query_heads, 1, dim], keys and values [batch, kv_heads, 1, dim]. Returns
        [batch, query_heads, 1, value_dim], float32 or, of a step on the GPU, the queries' dtype.
        """
        if layer == 0 and self._resident is None and on_gpu(queries):
            self._attach_if_due(budget)
        if self._resident is not None:
            if layer == 0:
                self._resident.reserve()
            return self._resident.submit(layer, queries, keys, values)
        q, k, v = (_host(states)[:, :, 0].contiguous() for states in (queries, keys, values))
        attended = self._attend(
            [
                AttendItem(sequence, layer, q[row], k[row], v[row], budget)
                for row, sequence in enumerate(self._sequences)
            ]
        )
        return torch.stack([torch.from_numpy(one.out) for one in attended])[:, :, None]

    def past(
        self, layer: int, queries: torch.Tensor, budget: Budget | None, exact: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends with several queries a row over what is stored, in one round trip for all.

        queries [batch, query_heads, n, dim]. Returns out [batch, query_heads, n, value_dim] and lse
        [batch, query_heads, n], float32; a row without tokens has out = 0 and lse = -inf.
        """
        self._leave()
        batch, heads, n, _ = queries.shape
        q = _host(queries).transpose(1, 2).contiguous()
        out = torch.zeros(batch, n, heads, self._shape.value_dim)
        lse = torch.full((batch, n, heads), -torch.inf)
        rows = [row for row in range(batch) if self._sequences[row].token_count(layer)]
        places = [(row, i) for row in rows for i in range(n)]
        attended = self._attend(
            [
                AttendItem(self._sequences[row], layer, q[row, i], budget=budget, exact=exact)
                for row, i in places
            ]
        )
        for place, one in zip(places, attended, strict=True):
            out[place] = torch.from_numpy(one.out)
            lse[place] = torch.from_numpy(one.lse)
        return out.transpose(1, 2), lse.transpose(1, 2)

    def select(self, sources: list[int]) -> None:
        """Makes row i what row sources[i] was: moved where it is wanted once, else forked."""
        self._leave()
        if not any(sequence.token_count() for sequence in self._sequences):
            self._select_empty(sources)
            return
        taken: set[int] = set()
        old, padding = self._sequences, self._padding
        for row in set(range(len(old))) - set(sources):
            old[row].close()
        chosen = []
        for source in sources:
            chosen.append(old[source].fork() if source in taken else old[source])
            taken.add(source)
        self._sequences = chosen
        if len(chosen) != len(old):
            self._batch = None
        self._padding = [padding[source] for source in sources]

    def _select_empty(self, sources: list[int]) -> None:
        """As select, while nothing is stored: one sequence is as good as another."""
        for surplus in self._sequences[len(sources) :]:
            surplus.close()
        del self._sequences[len(sources) :]
        while len(self._sequences) < len(sources):
            self._sequences.append(self._create())
        if len(sources) != len(self._padding):
            self._batch = None
        self._padding = [self._padding[source] for source in sources]

    def truncate(self, columns: int) -> None:
        """Keeps the first `columns` columns of every layer."""
        self._leave()
        for row, sequence in enumerate(self._sequences):
            tokens = max(columns - self._padding[row], 0)
            if tokens < sequence.token_count():
                sequence.truncate(tokens)

    def fork(self) -> Rows:
        """Returns rows of their own that share what is stored."""
        self._leave()
        copy = object.__new__(Rows)
        copy._session, copy._shape, copy._options = self._session, self._shape, self._options
        copy._padding = list(self._padding)
        copy._sequences = [
            sequence.fork() if sequence.token_count() else self._create()
            for sequence in self._sequences
        ]
        copy._resident, copy._batch = None, None
        copy._attach_after, copy._tokens_alone = self._attach_after, 0
        copy._labels = self._labels
        copy.counters = StepCounters()
        return copy

    def close(self) -> None:
        """Gives the sequences back; a daemon that is away lets their lease end instead.

        Raises LostStepError when the last token on a GPU was attended over nothing.
        """
        lost: LostStepError | None = None
        try:
            self._leave()
        except LostStepError as error:
            lost = error
        except WaveKVError:
            pass  # Of a daemon that is away.
        for sequence in self._sequences:
            with contextlib.suppress(WaveKVError):
                sequence.close()
        if lost is not None:
            raise lost

    def _attach_if_due(self, budget: Budget | None) -> None:
        """Before a single token: attaches the rows if enough of them have followed each other."""
        if self._attach_after is None:
            return
        if self._tokens_alone < self._attach_after:
            self._tokens_alone += 1
            return
        self._resident = try_resident(
            self._sequences, self._shape, self._options.max_tokens,
            self._batch and self._batch(),
            budgets=(self._options.index and self._options.index.budget, budget),
            deadline=self._options.deadline, cache_ratio=self._options.cache_ratio,
            # Refused at the first step, if at all, and not in the middle of a generation.
            required=self._options.resident is True and not self._attach_after,
        )  # fmt: skip
        if self._resident is None:
            self._attach_after = None  # Nor will they be another time.
        else:
            self._batch = weakref.ref(self._resident.batch)

    def _leave(self) -> None:
        self._tokens_alone = 0
        resident, self._resident = self._resident, None
        if resident is not None:
            self._attach_after = TOKENS_BEFORE_ATTACHING
            resident.leave()

    def _create(self) -> Sequence:
        return self._session.create_sequence(
            self._shape,
            self._options.max_tokens,
            index=self._options.index,
            label=self._options.label,
        )

    def _attend(self, items: list[AttendItem]) -> list[Attention]:
        attended = []
        for reply in self._session.attend_batch(items):
            if isinstance(reply, WaveKVError):
                raise reply
            self.counters += reply.counters
            attended.append(reply)
        return attended


def _host(states: torch.Tensor) -> torch.Tensor:
    return states.detach().to("cpu")
