"""Keys and values of a layer that stay in the model's process."""

from __future__ import annotations

import torch

# Columns that are left free behind a token when the states have to move: a token then costs no copy
# of all, and what is free is little beside what is there.
_ROOM_MIN = 256
_ROOM_SHARE = 8  # One in so many.

States = tuple[torch.Tensor, torch.Tensor]


class KeptStates:
    """Keys and values [batch, kv_heads, columns, dim] that grow, in place where there is room.

    What `append` returned is good until the columns it shows are cropped and written again.
    """

    def __init__(self) -> None:
        self._buffers: States | None = None
        self._columns = 0
        self._own = False  # Nobody else reads the buffers.

    @property
    def batch(self) -> int:
        return 0 if self._buffers is None else len(self._buffers[0])

    @property
    def nbytes(self) -> int:
        """Bytes held, room included."""
        return sum(buffer.nbytes for buffer in self._buffers or ())

    @property
    def states(self) -> States:
        """Keys and values; there must be some."""
        assert self._buffers is not None
        keys, values = (buffer[:, :, : self._columns] for buffer in self._buffers)
        return keys, values

    def append(self, keys: torch.Tensor, values: torch.Tensor, columns_max: int = 0) -> States:
        """Adds columns, and returns all. columns_max: room may be left for as many columns in all;
        for none if 0, as while a prompt is read."""
        begin, end = self._columns, self._columns + keys.shape[2]
        if self._buffers is None:
            self._buffers = (keys, values)  # The model's own tensors: no copy yet.
        else:
            if not self._fits(end):
                room = min(max(_ROOM_MIN, end // _ROOM_SHARE), max(columns_max - end, 0))
                self._move(end + room)
            for buffer, new in zip(self._buffers, (keys, values), strict=True):
                buffer[:, :, begin:end] = new
        self._columns = end
        return self.states

    def crop(self, columns: int) -> None:
        """Forgets all but the first `columns`."""
        self._columns = min(self._columns, columns)

    def select(self, rows: list[int]) -> None:
        """Makes row i of the batch what row rows[i] was."""
        if self._buffers is None:
            return
        keys, values = self.states
        index = torch.tensor(rows, device=keys.device)
        self._buffers, self._own = (keys[index], values[index]), True

    def fork(self) -> KeptStates:
        """Returns states of its own, which share memory until one of both grows."""
        copy = KeptStates()
        copy._buffers, copy._columns = self._buffers, self._columns
        self._own = False
        return copy

    def _fits(self, columns: int) -> bool:
        assert self._buffers is not None
        buffer = self._buffers[0]
        # What was made in inference mode may be written in inference mode alone.
        writable = not buffer.is_inference() or torch.is_inference_mode_enabled()
        return self._own and writable and columns <= buffer.shape[2]

    def _move(self, columns: int) -> None:
        """Moves to buffers of as many columns."""
        moved = []
        for states in self.states:
            batch, heads, used, dim = states.shape
            buffer = states.new_empty(batch, heads, columns, dim)
            buffer[:, :, :used] = states
            moved.append(buffer)
        self._buffers, self._own = (moved[0], moved[1]), True
