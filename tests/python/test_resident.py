"""Sequences that this process attends over on the device: what the daemon grants and refuses. A wave
buffer on a GPU is one over the driver made of memfds: no kernel runs here."""

import numpy as np
import pytest
import wavekv
from daemons import BIN, Daemon
from wavekv import ModelShape

TOKENS = 3000
SHAPE = ModelShape(layers=2, query_heads=4, kv_heads=2, key_dim=64, dtype="bf16")


@pytest.fixture(scope="module")
def device_address(tmp_path_factory):
    """A daemon whose wave buffer lies on a GPU."""
    folder = tmp_path_factory.mktemp("device")
    driver = {"LD_LIBRARY_PATH": str(BIN.parent / "tests" / "fake_cuda")}
    buffer = Daemon(
        "wavebufferd", f"--listen=unix:{folder}/b", "--backend=cuda", "--bytes_max=2GiB", **driver
    )
    daemon = Daemon(
        "wavekvd", f"--listen=unix:{folder}/k", "--pool_bytes=1GiB",
        f"--wave_buffer=unix:{folder}/b", "--wave_buffer_bytes=512MiB", **driver,
    )  # fmt: skip
    yield f"unix:{folder}/k"
    assert daemon.stop() == 0, daemon.log
    assert buffer.stop() == 0, buffer.log


@pytest.fixture
def rng(request):
    seed = np.random.SeedSequence().entropy
    request.node.add_report_section("call", "seed", str(seed))
    return np.random.default_rng(seed)


def filled(session, rng, build=True):
    sequence = session.create_sequence(SHAPE, max_tokens=TOKENS + 100, wave_buffer=True)
    rows = (SHAPE.layers, TOKENS, SHAPE.kv_heads, SHAPE.key_dim)
    dtype = wavekv.numpy_dtype("bf16")
    sequence.insert(0, *(rng.standard_normal(rows).astype(dtype) for _ in range(2)))
    if build:
        sequence.build_index()
    return sequence


def test_an_attachment_says_where_things_lie(device_address, rng):
    with wavekv.connect(device_address) as session, filled(session, rng) as sequence:
        attachment = sequence.attach_resident(ring_rows=1280)
        assert attachment.sequence_id == sequence.id
        assert attachment.device_uuid.startswith("GPU-")
        assert attachment.token_count == TOKENS
        assert attachment.ring_rows == 1280
        assert attachment.region_bytes > 0

        state = sequence.resident_status()
        assert state.ended is None
        assert state.token_count == TOKENS
        assert 0 < state.steady_first <= TOKENS
        assert (state.overflows, state.violations) == (0, 0)
        # Nothing is appended: it waits no longer than it is told to.
        assert sequence.resident_status(state.steady_first, wait=0.05) == state

        with pytest.raises(wavekv.AbortedError):
            sequence.attach_resident()
        row = np.zeros((SHAPE.kv_heads, SHAPE.key_dim), wavekv.numpy_dtype("bf16"))
        queries = np.ones((SHAPE.query_heads, SHAPE.key_dim), np.float32)
        with pytest.raises(wavekv.FailedPreconditionError):
            sequence.attend(0, queries, row, row)
        assert sequence.attend(0, queries).token_count == TOKENS

        sequence.detach_resident()
        assert sequence.attend(0, queries, row, row).token_count == TOKENS + 1
        with pytest.raises(wavekv.FailedPreconditionError):
            sequence.detach_resident()


def test_a_wave_buffer_in_host_memory_is_refused_with_the_cure(address, rng):
    with wavekv.connect(address) as session, filled(session, rng) as sequence:
        with pytest.raises(wavekv.FailedPreconditionError, match="backend=cuda"):
            sequence.attach_resident()


def test_options_that_cannot_be_are_named(device_address, rng):
    with wavekv.connect(device_address) as session, filled(session, rng) as sequence:
        with pytest.raises(wavekv.InvalidArgumentError, match="ring_rows is 100"):
            sequence.attach_resident(ring_rows=100)
        with pytest.raises(wavekv.InvalidArgumentError, match="cache_ratio is 2"):
            sequence.attach_resident(cache_ratio=2.0)
