"""wavekv.transformers beside a daemon that dies, beside others, and after it is forgotten."""

import concurrent.futures
import contextlib
import gc
import json
import pathlib
import subprocess
import sys
import warnings

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch_models as small  # noqa: E402
import wavekv  # noqa: E402
from daemons import BIN, Daemon  # noqa: E402
from transformers import StoppingCriteria  # noqa: E402
from wavekv.transformers import WaveKVCache  # noqa: E402

NEW_TOKENS = 10
DEADLINE_S = 2.0


pytestmark = pytest.mark.usefixtures("fresh_seed")


class At(StoppingCriteria):
    """Calls something once, after some tokens; stops nothing."""

    def __init__(self, tokens, call):
        self._left = tokens
        self._call = call

    def __call__(self, ids, scores, **kwargs):
        self._left -= 1
        if self._left == 0:
            self._call()
        return torch.zeros(len(ids), dtype=torch.bool)


def generate_and(model, prompts, cache, call, **options):
    """Generates; `call` is called after four of the tokens."""
    return small.generate(
        model, prompts, cache, NEW_TOKENS, stopping_criteria=[At(4, call)], **options
    )


@pytest.mark.parametrize("end", ["kill", "suspend"])
def test_a_daemon_that_ends_in_mid_generation_is_an_exception_that_names_it(
    private_daemon, model, end
):
    address, daemon = private_daemon
    cache = WaveKVCache(model.config, address, max_tokens=256, deadline=DEADLINE_S)
    prompts = small.make_prompts(2, 30, padding=[3])
    with pytest.raises((wavekv.UnavailableError, wavekv.DeadlineExceededError), match=address):
        generate_and(model, prompts, cache, getattr(daemon, end))
    with pytest.raises(wavekv.FailedPreconditionError, match="lost the daemon"), torch.no_grad():
        model(prompts.ids[:, :1], past_key_values=cache)
    if end == "suspend":
        daemon.kill()


@pytest.mark.parametrize("fallback", [False, True])
def test_a_daemon_that_was_restarted_knows_nothing_of_the_tokens(private_daemon, model, fallback):
    address, daemon = private_daemon
    cache = WaveKVCache(
        model.config, address, max_tokens=256, deadline=DEADLINE_S, fallback=fallback
    )
    prompts = small.make_prompts(2, 30, padding=[3])
    with contextlib.ExitStack() as after:

        def restart():
            daemon.kill()
            other = Daemon("wavekvd", f"--listen={address}", "--pool_bytes=256MiB")
            after.callback(other.stop)

        if fallback:
            with pytest.warns(RuntimeWarning, match=address):
                made = generate_and(model, prompts, cache, restart)
            small.assert_same_logits(model, prompts, made)
        else:
            with pytest.raises(wavekv.WaveKVError, match=address):
                generate_and(model, prompts, cache, restart)
            with pytest.raises(wavekv.FailedPreconditionError, match="lost the daemon"):
                model(prompts.ids[:, :1], past_key_values=cache)


def test_a_daemon_that_stops_before_the_prompt(private_daemon, model):
    address, daemon = private_daemon
    cache = WaveKVCache(
        model.config, address, max_tokens=256, deadline=DEADLINE_S, build_deadline=DEADLINE_S
    )
    daemon.suspend()
    with pytest.raises(wavekv.WaveKVError, match=address):
        small.generate(model, small.make_prompts(1, 30), cache, 2)
    daemon.kill()


@pytest.mark.parametrize("end", ["kill", "suspend"])
@pytest.mark.parametrize("beams", [1, 3])
def test_with_the_fallback_the_generation_ends_exactly(private_daemon, model, end, beams):
    address, daemon = private_daemon
    cache = WaveKVCache(
        model.config, address, max_tokens=256, deadline=DEADLINE_S, fallback=True
    )
    prompts = small.make_prompts(2, 30, padding=[3])
    with pytest.warns(RuntimeWarning, match=address):
        made = generate_and(
            model, prompts, cache, getattr(daemon, end), num_beams=beams, length_penalty=0.0,
            output_scores=beams > 1,
        )
    assert cache.failure is not None
    assert cache.get_seq_length() == 30 + NEW_TOKENS - 1
    if beams == 1:
        small.assert_same_logits(model, prompts, made)
    else:
        small.assert_beam_scores(model, prompts, made)
    if end == "suspend":
        daemon.kill()


def test_a_daemon_without_room_refuses_before_any_work(private_daemon, model):
    address, _ = private_daemon
    with pytest.raises(wavekv.ResourceExhaustedError):
        WaveKVCache(model.config, address, max_tokens=1 << 20)


def listed(address):
    """Ids of the sequences that the daemon has."""
    done = subprocess.run(
        [BIN / "wavekv", "sequences", "--address", address, "--json"],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    return {entry["id"] for entry in json.loads(done.stdout)["sequences"]}


def test_a_collected_cache_gives_its_sequences_back(private_daemon, model):
    address, _ = private_daemon
    with wavekv.connect(address) as session:
        cache = WaveKVCache(model.config, session=session, max_tokens=256)
        assert not listed(address)  # The first check of the model leaves nothing behind.
        small.generate(model, small.make_prompts(2, 30), cache, 4, num_beams=2)
        assert len(listed(address)) == 4
        del cache
        gc.collect()
        assert not listed(address)


def test_two_generations_at_once_in_one_process(address, model):
    """Two caches, each with a connection of its own, and two that share one."""
    with wavekv.connect(address) as session:
        caches = [WaveKVCache(model.config, address, max_tokens=256) for _ in range(2)]
        caches += [WaveKVCache(model.config, session=session, max_tokens=256) for _ in range(2)]
        prompts = [small.make_prompts(2, 40, padding=[row]) for row in range(4)]
        with concurrent.futures.ThreadPoolExecutor(4) as pool:
            made = list(
                pool.map(lambda pair: small.generate(model, *pair, NEW_TOKENS),
                         zip(prompts, caches, strict=True))
            )  # fmt: skip
        for prompt, one in zip(prompts, made, strict=True):
            small.assert_same_logits(model, prompt, one)
        for cache in caches:
            cache.close()


WORKER = """
import sys
sys.path.insert(0, sys.argv[1])
import torch_models as small
from wavekv.transformers import WaveKVCache
small.seed_everything()
model = small.make_model()
for turn in range(3):
    prompts = small.make_prompts(2, 40, padding=[turn])
    cache = WaveKVCache(model.config, sys.argv[2], max_tokens=256)
    small.assert_same_logits(model, prompts, small.generate(model, prompts, cache, 8))
"""


def test_two_processes_on_one_daemon(address):
    folder = str(pathlib.Path(small.__file__).parent)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, folder, address],
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        for _ in range(2)
    ]
    for worker in workers:
        output, _ = worker.communicate(timeout=300)
        assert worker.returncode == 0, output


@pytest.mark.parametrize("shared_memory", [True, False])
def test_a_generation_over_shared_memory_and_without_it(address, model, shared_memory):
    with wavekv.connect(address, shared_memory=shared_memory) as session:
        assert session.info.shared_memory == shared_memory, session.info.shared_memory_absent
        cache = WaveKVCache(model.config, session=session, max_tokens=256)
        prompts = small.make_prompts(2, 30, padding=[3])
        small.assert_same_logits(model, prompts, small.generate(model, prompts, cache, NEW_TOKENS))
        cache.close()


def test_a_cache_connects_over_shared_memory(address, model, monkeypatch):
    sessions = []
    create = wavekv.Session.create_sequence
    monkeypatch.setattr(
        wavekv.Session, "create_sequence",
        lambda self, *args, **options: sessions.append(self) or create(self, *args, **options),
    )  # fmt: skip
    WaveKVCache(model.config, address, max_tokens=256)
    assert sessions and all(session.info.shared_memory for session in sessions)


def test_no_warning_without_a_failure(address, model):
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        cache = WaveKVCache(model.config, address, fallback=True)
        prompts = small.make_prompts(1, 30)
        small.assert_same_logits(model, prompts, small.generate(model, prompts, cache, 4))
    assert cache.failure is None
    assert cache.local_bytes > 0  # Kept for the fallback.
