"""A stand-in for wavekv.gpu.ResidentBatch, which attends through the daemon, and for CUDA graphs."""

import functools
import types
import unittest.mock

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from wavekv.session import Sequence
from wavekv.transformers import resident, rows


class StandInStream:
    """Does what is submitted at once."""

    def submit(self, call):
        call()

    def synchronize(self):
        pass


class StandInGraph(TorchDispatchMode):
    """What happens inside it is done again, over the same memory, by each replay.

    As in a CUDA graph, what is submitted to the device is only noted, reading a value back is an
    error, and torch says that it captures.
    """

    def __init__(self, device):
        super().__init__()
        self._device = device
        self._calls = []

    def __enter__(self):
        self._device.streams.append(self)
        self._capturing = unittest.mock.patch("torch.cuda.is_current_stream_capturing", lambda: True)
        self._capturing.start()
        return super().__enter__()

    def __exit__(self, *error):
        self._capturing.stop()
        self._device.streams.pop()
        return super().__exit__(*error)

    def submit(self, call):
        self._calls.append(call)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert func is not torch.ops.aten._local_scalar_dense.default, "read back in a capture"
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            made = func(*args, **kwargs)
        self._calls.append(lambda: self._again(func, args, kwargs, made))
        return made

    @staticmethod
    def _again(func, args, kwargs, made):
        with torch._C.DisableTorchFunctionSubclass():
            again = func(*args, **kwargs)
        for old, new in zip(tree_flatten(made)[0], tree_flatten(again)[0], strict=True):
            if isinstance(old, torch.Tensor) and old.data_ptr() != new.data_ptr():
                old.copy_(new)

    def replay(self):
        for call in self._calls:
            call()


class StandIn:
    """A device: which sequences are attached, and what a batch of them is asked for."""

    def __init__(self):
        self.attached = set()
        self.attachments = 0
        self.tokens_reserved = 0
        self.tokens_begun = 0
        self.room = 10**9
        self.outcome = "attending"
        self.refuses = {}  # By the number of the attachment: an exception.
        self.states = []  # What the daemon says next, when it is asked.
        self.streams = [StandInStream()]  # The last one is current.

    def attach(self, sequence, cache_ratio):
        self.attachments += 1
        self.cache_ratio = cache_ratio
        if self.attachments in self.refuses:
            raise self.refuses[self.attachments]
        assert sequence not in self.attached
        self.attached.add(sequence)
        return types.SimpleNamespace(sequence=sequence, region_bytes=1000)

    def detach(self, sequence):
        self.attached.remove(sequence)

    def status(self, sequence, steady_first_above=0, wait=0.0):
        del sequence, wait
        return self.states.pop(0) if self.states else state(steady_first_above)


class StandInBatch:
    device = None

    def __init__(self, device, batch):
        self._device = device
        self._entries = [None] * batch

    def open(self, attachment):
        return attachment

    def set_sequence(self, entry, opened, stream):
        del stream
        self._entries[entry] = opened

    def outcome(self, entry):
        del entry
        return self._device.outcome

    def room(self, entry):
        del entry
        return self._device.room

    def tokens(self, entry):
        return self._entries[entry].sequence.token_count()

    def note_covered(self, entry, steady_first):
        del entry
        self._device.room = steady_first

    def reserve_token(self):
        self._device.tokens_reserved += 1
        assert self._device.room > 0
        self._device.room -= 1

    def begin_token(self, stream):
        stream.submit(self._begin_token)

    def attend(self, layer, queries, out, lse, stream, *, keys, values):
        stream.submit(lambda: self._attend(layer, queries, out, lse, keys, values))

    def _begin_token(self):
        self._device.tokens_begun += 1

    def _attend(self, layer, queries, out, lse, keys, values):
        for entry, opened in enumerate(self._entries):
            assert opened.sequence in self._device.attached
            one = opened.sequence.attend(layer, queries[entry], keys[entry], values[entry])
            out[entry], lse[entry] = torch.from_numpy(one.out), torch.from_numpy(one.lse)


def state(steady_first, ended=None):
    return types.SimpleNamespace(steady_first=steady_first, ended=ended)


@pytest.fixture
def device(monkeypatch):
    stand_in = StandIn()
    monkeypatch.setattr(rows, "on_gpu", lambda states: True)
    monkeypatch.setattr(
        resident, "_new_batch", lambda shape, max_tokens, batch: StandInBatch(stand_in, batch)
    )
    monkeypatch.setattr(resident.ResidentSteps, "_stream", lambda self: stand_in.streams[-1])
    monkeypatch.setattr(resident, "Ordered", lambda tensor: tensor)
    for name, call in {
        "attach_resident": stand_in.attach,
        "detach_resident": stand_in.detach,
        "resident_status": stand_in.status,
    }.items():
        method = functools.partialmethod(lambda self, call, *a, **k: call(self, *a, **k), call)
        monkeypatch.setattr(Sequence, name, method, raising=False)
    return stand_in
