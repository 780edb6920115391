"""The Python SDK against a real daemon, compared with a float64 oracle on fresh random inputs."""

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback

import ml_dtypes
import numpy as np
import pytest
import wavekv
from daemons import BIN
from wavekv import Budget, ModelShape

LAYERS, QUERY_HEADS, KV_HEADS, DIM = 2, 6, 2, 64
TOKENS = 2500


def oracle(queries, keys, values, scale):
    """Exact attention in float64: q [heads, dim], k and v [tokens, kv_heads, dim] -> out, lse."""
    group = queries.shape[0] // keys.shape[1]
    out, lse = [], []
    for head, query in enumerate(queries.astype(np.float64)):
        k = keys[:, head // group].astype(np.float64)
        v = values[:, head // group].astype(np.float64)
        logits = scale * (k @ query)
        top = logits.max()
        weights = np.exp(logits - top)
        lse.append(top + np.log(weights.sum()))
        out.append(weights @ v / weights.sum())
    return np.array(out), np.array(lse)


def clustered(rng, tokens, heads, dim):
    """Keys with structure: a new topic every 4 tokens, plus noise."""
    topics = rng.standard_normal((heads, 64, dim))
    chosen = rng.integers(0, 64, (heads, tokens // 4 + 1)).repeat(4, axis=1)[:, :tokens]
    keys = np.stack([topics[h][chosen[h]] for h in range(heads)], axis=1)
    return keys + 0.5 * rng.standard_normal(keys.shape)


@pytest.fixture
def rng(request):
    seed = np.random.SeedSequence().entropy
    request.node.add_report_section("call", "seed", str(seed))
    return np.random.default_rng(seed)


@pytest.fixture
def session(address):
    with wavekv.connect(address, client_name="test") as session:
        yield session


def shape(dtype="f32", **changes):
    fields = dict(layers=LAYERS, query_heads=QUERY_HEADS, kv_heads=KV_HEADS, key_dim=DIM, dtype=dtype)
    return ModelShape(**{**fields, **changes})


def filled(session, rng, dtype="f32", tokens=TOKENS, **options):
    """Returns a sequence with random content and what it holds, as stored."""
    keys = np.stack([clustered(rng, tokens, KV_HEADS, DIM) for _ in range(LAYERS)])
    values = rng.standard_normal((LAYERS, tokens, KV_HEADS, DIM))
    keys, values = (a.astype(wavekv.numpy_dtype(dtype)) for a in (keys, values))
    sequence = session.create_sequence(shape(dtype), max_tokens=tokens + 256, **options)
    sequence.insert(0, keys, values)
    return sequence, keys, values


@pytest.mark.parametrize(
    "dtype, tolerance",
    # Half an ulp of the stored type does not matter: the oracle reads the stored bytes. What is left
    # is float32 accumulation over 2,500 tokens.
    [("f32", 2e-5), ("f16", 2e-5), ("bf16", 2e-5)],
)
def test_exact_attention_equals_the_oracle(session, rng, dtype, tolerance):
    sequence, keys, values = filled(session, rng, dtype)
    with sequence:
        sequence.build_index()
        for layer in range(LAYERS):
            queries = rng.standard_normal((QUERY_HEADS, DIM)).astype(np.float32)
            step = sequence.attend(layer, queries, exact=True)
            out, lse = oracle(queries, keys[layer], values[layer], 1 / np.sqrt(DIM))
            np.testing.assert_allclose(step.out, out, rtol=0, atol=tolerance)
            np.testing.assert_allclose(step.lse, lse, rtol=tolerance, atol=tolerance)
            assert step.counters.kv_bytes_read_ratio == pytest.approx(1.0)


def test_a_generous_budget_comes_close_and_reads_less(session, rng):
    sequence, keys, values = filled(session, rng)
    with sequence:
        sequence.build_index()
        queries = keys[0, 1000].repeat(QUERY_HEADS // KV_HEADS, axis=0).astype(np.float32) * 3
        step = sequence.attend(0, queries, budget=Budget.ratio(0.2))
        out, _ = oracle(queries, keys[0], values[0], 1 / np.sqrt(DIM))
        error = np.linalg.norm(step.out - out) / np.linalg.norm(out)
        assert error < 0.05
        assert step.counters.retrieved_clusters > 0
        assert step.counters.estimated_clusters > 0
        assert 0 < step.counters.kv_bytes_read_ratio < 0.5
        steady = sequence.attend(0, queries, budget=Budget.steady_only())
        assert np.linalg.norm(steady.out - out) / np.linalg.norm(out) > error


def test_decode_appends_and_retries_are_no_ops(session, rng):
    sequence, keys, values = filled(session, rng)
    with sequence:
        sequence.build_index()
        k, v = rng.standard_normal((2, KV_HEADS, DIM)).astype(np.float32)
        queries = rng.standard_normal((QUERY_HEADS, DIM)).astype(np.float32)
        step = sequence.attend(1, queries, k, v, exact=True)
        assert step.token_count == TOKENS + 1
        out, _ = oracle(
            queries,
            np.concatenate([keys[1], k[None]]),
            np.concatenate([values[1], v[None]]),
            1 / np.sqrt(DIM),
        )
        np.testing.assert_allclose(step.out, out, atol=2e-5)
        sequence.insert(TOKENS, k[None], v[None], layers=[1])  # The same bytes again.
        with pytest.raises(wavekv.AbortedError, match="position"):
            sequence.insert(TOKENS, k[None] + 1, v[None], layers=[1])
        assert sequence.attend(1, queries, exact=True).token_count == TOKENS + 1


def test_layouts_and_layers_come_back_as_themselves(session):
    # Every value codes its layer, head and position, so that any mix-up shows.
    tokens = 300
    layer, position, head = np.meshgrid(
        np.arange(LAYERS), np.arange(tokens), np.arange(KV_HEADS), indexing="ij"
    )
    code = (layer * 10000 + head * 1000 + position).astype(np.float32)
    values = np.repeat(code[..., None], DIM, axis=3)
    keys = np.ones((LAYERS, tokens, KV_HEADS, DIM), np.float32)
    with (
        session.create_sequence(shape(), max_tokens=tokens) as nhd,
        session.create_sequence(shape(), max_tokens=tokens) as hnd,
    ):
        nhd.insert(0, keys, values)
        hnd.insert(0, keys.swapaxes(1, 2), values.swapaxes(1, 2), layout="HND")
        for sequence in (nhd, hnd):
            for index in range(LAYERS):
                result = sequence.query(
                    index, np.zeros((QUERY_HEADS, DIM), np.float32), inline_rows=True
                )
                for zones in result.heads:
                    np.testing.assert_array_equal(
                        zones.values[:, 0], code[index, zones.positions, zones.kv_head]
                    )
                    assert sorted(zones.positions) == list(range(tokens))


class DLPackOnly:
    """An array of another library: nothing but the DLPack protocol."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **kwargs):
        return self._array.__dlpack__(**kwargs)


@pytest.mark.parametrize("strided", [False, True])
def test_dlpack_arrays_are_read_like_numpy(session, rng, strided):
    sequence, keys, values = filled(session, rng, tokens=600)
    with sequence, session.create_sequence(shape(), max_tokens=600) as other:
        if strided:
            # A view with an offset and strides: what an engine's cache slice looks like.
            wide = np.zeros((LAYERS, 600, KV_HEADS, 2 * DIM + 8), np.float32)
            wide[..., 8 : 8 + DIM], wide[..., 8 + DIM :] = keys, values
            k, v = wide[..., 8 : 8 + DIM], wide[..., 8 + DIM :]
        else:
            k, v = keys, values
        other.insert(0, DLPackOnly(k), DLPackOnly(v))
        queries = rng.standard_normal((QUERY_HEADS, DIM)).astype(np.float32)
        np.testing.assert_array_equal(
            sequence.attend(0, queries).out, other.attend(0, DLPackOnly(queries)).out
        )


def big_endian(array):
    # Its dtype is named like that of the machine's own order.
    return array.astype(array.dtype.newbyteorder(">"))


def fortran(array):
    return np.asfortranarray(array)


def every_second(array):
    return np.repeat(array, 2, axis=0)[::2]


def unaligned(array):
    memory = np.empty(array.nbytes + 1, np.uint8)[1:]
    view = memory.view(array.dtype).reshape(array.shape)
    view[...] = array
    return view


@pytest.mark.parametrize("form", [big_endian, fortran, every_second, unaligned])
@pytest.mark.parametrize("dtype", ["f32", "f16"])
def test_numpy_arrays_of_any_form_hold_the_same_numbers(session, rng, dtype, form):
    sequence, keys, values = filled(session, rng, dtype, tokens=300)
    with sequence, session.create_sequence(shape(dtype), max_tokens=301) as other:
        other.insert(0, form(keys), form(values))
        queries = rng.standard_normal((QUERY_HEADS, DIM)).astype(np.float32)
        k, v = rng.standard_normal((2, KV_HEADS, DIM)).astype(wavekv.numpy_dtype(dtype))
        step = sequence.attend(1, queries, k, v)
        again = other.attend(1, form(queries), form(k), form(v))
        np.testing.assert_array_equal(again.out, step.out)
        np.testing.assert_array_equal(again.lse, step.lse)


def test_the_wave_buffer_path_equals_attend(session, rng):
    sequence, _, _ = filled(session, rng, "bf16", wave_buffer=True)
    with sequence:
        sequence.build_index()
        counters = wavekv.StepCounters()
        for step in range(8):
            queries = rng.standard_normal((QUERY_HEADS, DIM)).astype(np.float32)
            staged = sequence.attend_staged(0, queries)
            direct = sequence.attend(0, queries)
            np.testing.assert_allclose(staged.out, direct.out, atol=2e-5)
            np.testing.assert_allclose(staged.lse, direct.lse, atol=2e-5)
            counters += staged.counters
        assert counters.cache_hit_blocks + counters.cache_miss_blocks > 0


def test_estimate_is_bounded(session, rng):
    sequence, _, _ = filled(session, rng)
    with sequence:
        sequence.build_index()
        queries = 2 * rng.standard_normal((QUERY_HEADS, DIM)).astype(np.float32)
        estimation = sequence.estimate(0, queries, budget=Budget.clusters(3))
        assert (estimation.lse_lower <= estimation.lse + 1e-4).all()
        assert (estimation.lse_upper >= estimation.lse - 1e-4).all()


def test_fork_and_truncate(session, rng):
    sequence, keys, values = filled(session, rng)
    with sequence:
        sequence.build_index()
        queries = rng.standard_normal((QUERY_HEADS, DIM)).astype(np.float32)
        before = sequence.attend(0, queries)
        with sequence.fork() as child:
            np.testing.assert_array_equal(child.attend(0, queries).out, before.out)
            child.truncate(700)
            assert child.generation > sequence.generation
            out, _ = oracle(queries, keys[0, :700], values[0, :700], 1 / np.sqrt(DIM))
            np.testing.assert_allclose(child.attend(0, queries, exact=True).out, out, atol=2e-5)
        np.testing.assert_array_equal(sequence.attend(0, queries).out, before.out)


def test_batches_mix_lengths_and_errors_stay_with_their_item(session, rng):
    first, _, _ = filled(session, rng, tokens=500)
    second, _, _ = filled(session, rng, tokens=1400)
    with first, second:
        queries = rng.standard_normal((QUERY_HEADS, DIM)).astype(np.float32)
        bad = np.full((QUERY_HEADS, DIM), np.nan, np.float32)
        results = session.attend_batch(
            [
                wavekv.AttendItem(first, 0, queries),
                wavekv.AttendItem(first, 1, bad),
                wavekv.AttendItem(second, 1, queries),
            ]
        )
        assert results[0].token_count == 500
        assert isinstance(results[1], wavekv.InvalidArgumentError)
        assert results[2].token_count == 1400
        np.testing.assert_array_equal(results[2].out, second.attend(1, queries).out)


def _bad_inserts():
    good = np.zeros((LAYERS, 4, KV_HEADS, DIM), np.float32)
    nan = good.copy()
    nan[1, 2, 1, 5] = np.nan
    inf = good.copy()
    inf[0, 3, 0, 0] = np.inf
    # Each row: name, first position, keys, values, layers, exception, what the text must name.
    return [
        ("gap", TOKENS + 9, good, good, None, wavekv.FailedPreconditionError, str(TOKENS)),
        ("nan", TOKENS, nan, good, None, wavekv.InvalidArgumentError, f"{TOKENS + 2}"),
        ("inf in values", TOKENS, good, inf, None, wavekv.InvalidArgumentError, f"{TOKENS + 3}"),
        ("wrong heads", TOKENS, good[:, :, :1], good, None, wavekv.InvalidArgumentError, "2"),
        ("wrong dim", TOKENS, good[..., :32], good, None, wavekv.InvalidArgumentError, "64"),
        ("wrong dtype", TOKENS, good.astype(np.float16), good, None, wavekv.InvalidArgumentError, "f32"),
        ("unknown layer", TOKENS, good, good, [0, 7], wavekv.InvalidArgumentError, "7"),
        ("layer twice", TOKENS, good, good, [1, 1], wavekv.InvalidArgumentError, "1"),
        ("too long", TOKENS, np.zeros((LAYERS, 400, KV_HEADS, DIM), np.float32),
         np.zeros((LAYERS, 400, KV_HEADS, DIM), np.float32), None, wavekv.WaveKVError, str(TOKENS + 256)),
    ]  # fmt: skip


@pytest.mark.parametrize("row", _bad_inserts(), ids=lambda row: row[0])
def test_bad_inserts_change_nothing(session, rng, row):
    _, position, keys, values, layers, error, text = row
    sequence, _, _ = filled(session, rng)
    with sequence:
        queries = rng.standard_normal((QUERY_HEADS, DIM)).astype(np.float32)
        before = [sequence.attend(layer, queries) for layer in range(LAYERS)]
        with pytest.raises(error, match=text):
            sequence.insert(position, keys, values, layers=layers)
        for layer in range(LAYERS):
            after = sequence.attend(layer, queries)
            assert after.token_count == TOKENS
            np.testing.assert_array_equal(after.out, before[layer].out)


def test_bad_arrays_are_refused_before_they_travel(session):
    with session.create_sequence(shape(), max_tokens=16) as sequence:
        with pytest.raises(TypeError, match="float64"):
            sequence.attend(0, np.zeros((QUERY_HEADS, DIM)))
        with pytest.raises(TypeError, match="list"):
            sequence.attend(0, [[0.0] * DIM] * QUERY_HEADS)
        with pytest.raises(TypeError, match="queries: is a NoneType"):
            sequence.attend(0, None)
        with pytest.raises(TypeError, match="queries: is a NoneType"):
            session.attend_batch([wavekv.AttendItem(sequence, 0, None)])
        with pytest.raises(ValueError, match="layout"):
            sequence.insert(0, np.zeros((LAYERS, 1, KV_HEADS, DIM), np.float32),
                            np.zeros((LAYERS, 1, KV_HEADS, DIM), np.float32), layout="NDH")  # fmt: skip


@pytest.mark.parametrize(
    "changes, options, text",
    [
        (dict(query_heads=5), {}, "multiple"),  # No whole group per KV head.
        (dict(key_dim=16), {}, "32"),
        (dict(value_dim=512), {}, "256"),
        ({}, dict(logit_soft_cap=30.0), "soft"),  # Refused by name.
        ({}, dict(sliding_window=4096), "sliding"),
        ({}, dict(index=wavekv.IndexOptions(segment_tokens=1000)), "segment_tokens"),
    ],
)
def test_unservable_models_are_refused_by_name(session, changes, options, text):
    with pytest.raises(wavekv.InvalidArgumentError, match=text):
        session.create_sequence(shape(**changes), max_tokens=64, **options)


def test_over_the_limit_is_refused_at_creation(session):
    big = shape(layers=64, query_heads=32, kv_heads=32)
    with pytest.raises(wavekv.ResourceExhaustedError, match="pool_bytes|tenant_bytes_max"):
        session.create_sequence(big, max_tokens=4_000_000)


def test_attention_over_nothing_is_empty(session):
    with session.create_sequence(shape(), max_tokens=64) as sequence:
        step = sequence.attend(0, np.ones((QUERY_HEADS, DIM), np.float32))
        assert (step.out == 0).all()
        assert np.isneginf(step.lse).all()


def test_a_sequence_that_an_operator_dropped_is_left_in_peace(session, address):
    with session.create_sequence(shape(), max_tokens=64) as sequence:
        command = [BIN / "wavekv", "drop", str(sequence.id), "--address", address]
        subprocess.run(command, check=True)
        with pytest.raises(wavekv.NotFoundError):
            sequence.attend(0, np.ones((QUERY_HEADS, DIM), np.float32))


def in_a_forked_child(body):
    """The exit code of body() in a fork: 0, or 1 when it raises; killed after a while."""
    child = os.fork()
    if child == 0:
        try:
            signal.alarm(20)
            body()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_forked_child_is_refused_and_its_parent_undisturbed(address, rng, shared_memory):
    session = wavekv.connect(address, shared_memory=shared_memory)
    sequence = session.create_sequence(shape(), max_tokens=64)
    keys = rng.standard_normal((LAYERS, 50, KV_HEADS, DIM)).astype(np.float32)
    sequence.insert(0, keys, keys)
    queries = rng.standard_normal((QUERY_HEADS, DIM)).astype(np.float32)
    before = sequence.attend(0, queries).out

    def child():
        nonlocal session, sequence
        for call in (lambda: sequence.attend(0, queries), lambda: session.create_sequence(shape(), 64)):
            with pytest.raises(wavekv.FailedPreconditionError, match="is a fork"):
                call()
        sequence = session = None
        gc.collect()

    assert in_a_forked_child(child) == 0
    np.testing.assert_array_equal(sequence.attend(0, queries).out, before)
    sequence.close()
    session.close()


def test_without_an_address_the_environment_names_the_daemon(session, address, monkeypatch):
    monkeypatch.setenv("WAVEKV_ADDRESS", address)
    with wavekv.connect() as other:
        assert other.info.epoch == session.info.epoch


def test_bf16_bits_survive(session, rng):
    bits = rng.standard_normal((LAYERS, 100, KV_HEADS, DIM)).astype(ml_dtypes.bfloat16)
    with session.create_sequence(shape("bf16"), max_tokens=128) as sequence:
        sequence.insert(0, bits, bits)
        result = sequence.query(0, np.zeros((QUERY_HEADS, DIM), np.float32), inline_rows=True)
        for zones in result.heads:
            np.testing.assert_array_equal(
                zones.keys.view(np.uint16), bits[0, zones.positions, zones.kv_head].view(np.uint16)
            )


def labels(address):
    """Returns the labels of the sequences that the daemon lists."""
    out = subprocess.run(
        [BIN / "wavekv", "sequences", "--json", "--address", address],
        capture_output=True, text=True, check=True, timeout=30,
    )  # fmt: skip
    return [sequence["label"] for sequence in json.loads(out.stdout)["sequences"]]


def test_collected_sequences_are_dropped(address, session):
    sequence = session.create_sequence(shape(), max_tokens=64, label="collected")
    assert "collected" in labels(address)
    del sequence
    gc.collect()
    assert "collected" not in labels(address)


def test_other_threads_run_while_a_stopped_daemon_is_told_of_a_drop(private_daemon):
    address, daemon = private_daemon
    with wavekv.connect(address) as session:
        held = [session.create_sequence(shape(), max_tokens=64, label="held")]
        order = []

        def drop():
            held.clear()
            order.append("dropped")

        # A thread keeps the GIL until it lets go of it by itself: this one is not back from start()
        # before the other has let go, in mid-destructor.
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)
        try:
            daemon.suspend()
            thread = threading.Thread(target=drop)
            thread.start()
            order.append("meanwhile")
            daemon.signal(signal.SIGCONT)
        finally:
            sys.setswitchinterval(interval)
        thread.join()
        assert order == ["meanwhile", "dropped"]
        assert "held" not in labels(address)


def test_a_dead_daemon_costs_one_deadline(private_daemon):
    address, daemon = private_daemon
    session = wavekv.connect(address, deadline=2.0)
    sequence = session.create_sequence(shape(), max_tokens=64)
    queries = np.ones((QUERY_HEADS, DIM), np.float32)
    sequence.attend(0, queries)
    daemon.suspend()
    began = time.monotonic()
    with pytest.raises((wavekv.UnavailableError, wavekv.DeadlineExceededError)):
        sequence.attend(0, queries)
    assert time.monotonic() - began < 10
    daemon.kill()
    with pytest.raises(wavekv.UnavailableError):
        sequence.attend(0, queries)
    sequence.release()


def test_both_ways_answer_alike(address, rng):
    keys = clustered(rng, TOKENS, KV_HEADS, DIM).astype(np.float32)
    values = rng.standard_normal((TOKENS, KV_HEADS, DIM)).astype(np.float32)
    queries = rng.standard_normal((QUERY_HEADS, DIM)).astype(np.float32)
    answers = []
    for shared_memory in (True, False):
        with wavekv.connect(address, shared_memory=shared_memory) as session:
            assert session.info.shared_memory == shared_memory, session.info.shared_memory_absent
            assert bool(session.info.shared_memory_absent) != shared_memory
            with session.create_sequence(shape(layers=1), max_tokens=TOKENS) as sequence:
                sequence.insert(0, keys[None], values[None])
                sequence.build_index()
                answers.append(sequence.attend(0, queries))
    np.testing.assert_array_equal(answers[0].out, answers[1].out)
    np.testing.assert_array_equal(answers[0].lse, answers[1].lse)
