"""Short contexts that are attended exactly in the model's process (full_attention), and what happens
when they have grown beyond it."""

import random

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch_models as small  # noqa: E402
import wavekv  # noqa: E402
from resident_stand_in import device  # noqa: E402, F401
from test_transformers_life import generate_and, listed  # noqa: E402
from wavekv.transformers import WaveKVCache, full  # noqa: E402
from wavekv.transformers.kept import KeptStates  # noqa: E402
from wavekv.transformers.models import UnsupportedModelError  # noqa: E402
from wavekv.transformers.rows import Rows  # noqa: E402

FOREVER = 4000
BYTES_A_COLUMN = 2 * 2 * 2 * 32 * 4  # Keys and values, layers, KV heads, dim, float32.


@pytest.fixture(autouse=True)
def fresh_random(fresh_seed):
    random.seed(fresh_seed)


def test_below_the_limit_it_is_exact_and_the_daemon_has_nothing(address, model):
    prompts = small.make_prompts(3, 37, padding=[9, 0, 36])
    cache = WaveKVCache(model.config, address, full_attention=FOREVER)
    made = small.generate(model, prompts, cache, 8)
    small.assert_same_logits(model, prompts, made)
    assert cache.get_seq_length() == 44
    assert [s.token_count() for s in cache.sequences] == [0, 0, 0]
    assert cache.counters == wavekv.StepCounters()
    assert cache.local_bytes > 0
    cache.close()
    assert (cache.local_bytes, cache.sequences) == (0, [])


# 37 are the prompt's, 44 are stored in the end.
@pytest.mark.parametrize("limit", [0, 36, 37, 38, 41, 43, 44])
@pytest.mark.parametrize("fallback", [False, True])
def test_a_generation_that_outgrows_the_limit_goes_on(address, model, limit, fallback):
    prompts = small.make_prompts(3, 37, padding=[9, 0, 36])
    cache = WaveKVCache(model.config, address, full_attention=limit, fallback=fallback)
    made = small.generate(model, prompts, cache, 8)
    small.assert_same_logits(model, prompts, made)
    stored = limit < 44
    counts = [44 - 9, 44, 44 - 36] if stored else [0, 0, 0]
    for layer in range(2):
        assert [s.token_count(layer) for s in cache.sequences] == counts
    assert (cache.counters.steady_tokens > 0) == stored
    assert (cache.local_bytes > 0) == (fallback or not stored)


@pytest.mark.parametrize("limit", [39, 50, 90, 100, 102])
def test_a_prompt_in_chunks_that_outgrows_the_limit(address, model, limit):
    prompts = small.make_prompts(2, 100)
    cache = WaveKVCache(model.config, address, full_attention=limit)
    made = small.generate(model, prompts, cache, 5, prefill_chunk_size=40)
    small.assert_same_logits(model, prompts, made)
    assert [s.token_count(1) for s in cache.sequences] == [104, 104]
    assert cache.local_bytes == 0


def assert_next(model, ids, logits):
    """The logits of the first token of ids after ids are those of exact attention."""
    tokens = torch.cat([ids, ids[:, :1]], 1)
    exact = small.exact_logits(model, tokens, torch.ones_like(tokens))[:, -1:]
    torch.testing.assert_close(logits, exact, rtol=0, atol=small.LOGITS_TOLERANCE)


@pytest.mark.parametrize("layer", [0, 1])
def test_who_interrupts_the_hand_over_can_go_on(address, model, monkeypatch, layer):
    ids = small.make_prompts(2, 40).ids
    cache = WaveKVCache(model.config, address, full_attention=40)
    insert, left = Rows.insert, [layer + 1]

    def interrupted(self, at, *rest):
        left[0] -= 1
        if left[0] == 0:
            raise KeyboardInterrupt
        return insert(self, at, *rest)

    with torch.no_grad():
        model(ids, past_key_values=cache)
        monkeypatch.setattr(Rows, "insert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            model(ids[:, :1], past_key_values=cache)
        found = model(ids[:, :1], past_key_values=cache).logits
    assert_next(model, ids, found)
    assert [s.token_count(layer) for s in cache.sequences] == [41, 41]


def test_after_a_pass_that_broke_off_the_cache_is_cropped_first(address, model):
    ids = small.make_prompts(1, 40).ids
    cache = WaveKVCache(model.config, address, full_attention=FOREVER)
    holes = torch.ones(1, 41, dtype=torch.long)
    holes[0, 20] = 0
    with torch.no_grad():
        model(ids, past_key_values=cache)
        with pytest.raises(UnsupportedModelError):
            model(ids[:, :1], past_key_values=cache, attention_mask=holes)
        with pytest.raises(wavekv.FailedPreconditionError, match="crop the cache to the 40"):
            model(ids[:, :1], past_key_values=cache)
        cache.crop(40)
        found = model(ids[:, :1], past_key_values=cache).logits
    assert_next(model, ids, found)


@pytest.mark.parametrize("message", [1, 5, 60])
@pytest.mark.parametrize("beyond", [True, False])
def test_the_next_message_of_a_conversation(address, model, message, beyond):
    first = small.make_prompts(2, 48, padding=[20])
    limit = 53 if beyond else FOREVER  # As many as the first turn stores.
    cache = WaveKVCache(model.config, address, full_attention=limit)
    turn = small.generate(model, first, cache, 6)
    assert not any(s.token_count() for s in cache.sequences)
    more = torch.randint(3, small.VOCABULARY, (2, message))
    ids = torch.cat([turn.sequences, more], dim=1)
    second = small.Prompts(ids, torch.cat([first.mask, first.mask.new_ones(2, 6 + message)], dim=1))
    made = small.generate(model, second, cache, 6)
    small.assert_same_logits(model, second, made)
    assert all(s.token_count() for s in cache.sequences) == beyond


@pytest.mark.parametrize("limit", [30, 34, FOREVER])
def test_beam_search(address, model, limit):
    prompts = small.make_prompts(2, 30, padding=[4])
    cache = WaveKVCache(model.config, address, full_attention=limit)
    made = small.generate(
        model, prompts, cache, 10, num_beams=4, output_scores=True, length_penalty=0.0
    )
    small.assert_beam_scores(model, prompts, made)
    assert (cache.local_bytes > 0) == (limit == FOREVER)


@pytest.mark.parametrize("limit", [50, 56, FOREVER])
def test_assisted_decoding(address, model, limit):
    prompts = small.make_prompts(1, 50)
    prompts.ids[:, 25:] = prompts.ids[:, :25]
    cache = WaveKVCache(model.config, address, full_attention=limit)
    made = small.generate(model, prompts, cache, 16, prompt_lookup_num_tokens=3)
    small.assert_greedy(model, prompts, made.sequences)
    assert (cache.sequences[0].token_count() > 0) == (limit < FOREVER)


@pytest.mark.parametrize("limit", [47, FOREVER])
def test_rows_are_selected_and_cropped(address, model, limit):
    prompts = small.make_prompts(3, 40, padding=[0, 12])
    cache = WaveKVCache(model.config, address, full_attention=limit)
    small.generate(model, prompts, cache, 4)
    cache.batch_select_indices(torch.tensor([2, 1]))
    cache.crop(-3)
    cache.batch_repeat_interleave(2)
    rows = [2, 2, 1, 1]
    chosen = small.Prompts(prompts.ids[rows], prompts.mask[rows])
    ids = torch.cat([chosen.ids, torch.randint(3, small.VOCABULARY, (4, 3))], dim=1)
    longer = small.Prompts(ids, torch.cat([chosen.mask, chosen.mask.new_ones(4, 3)], dim=1))
    small.assert_same_logits(model, longer, small.generate(model, longer, cache, 8))
    assert len(cache.sequences) == 4


def test_forks_go_their_own_ways(address, model):
    """Each writes its tokens where the other's could be, and two of three outgrow the limit."""
    prompts = small.make_prompts(2, 40, padding=[3])
    prompt = WaveKVCache(model.config, address, full_attention=50)
    small.generate(model, prompts, prompt, 3)
    prompt.crop(40)
    caches = [prompt, prompt.fork(), prompt.fork()]
    made = []
    for tokens, cache in zip((4, 14, 14), caches, strict=True):
        ids = torch.cat([prompts.ids, torch.randint(3, small.VOCABULARY, (2, 2))], dim=1)
        longer = small.Prompts(ids, torch.cat([prompts.mask, prompts.mask.new_ones(2, 2)], dim=1))
        made.append((longer, small.generate(model, longer, cache, tokens)))
    for longer, one in made:
        small.assert_same_logits(model, longer, one)
    longer = small.Prompts(made[0][1].sequences, torch.ones(2, 46, dtype=torch.long))
    longer.mask[0, :3] = 0
    small.assert_same_logits(model, longer, small.generate(model, longer, prompt, 8))


def test_a_prompt_of_inference_mode_is_gone_on_with_outside_of_it(address, model):
    prompts = small.make_prompts(1, 40)
    cache = WaveKVCache(model.config, address, full_attention=FOREVER)
    with torch.inference_mode():
        for ids in prompts.ids[:, :39].split(13, dim=1):
            model(ids, past_key_values=cache)
    small.assert_same_logits(model, prompts, small.generate(model, prompts, cache, 4))


def test_a_cache_that_is_reset_attends_here_again(address, model):
    cache = WaveKVCache(model.config, address, full_attention=33)
    for _ in range(2):
        prompts = small.make_prompts(2, 30)
        small.assert_same_logits(model, prompts, small.generate(model, prompts, cache, 4))
        assert not any(s.token_count() for s in cache.sequences)
        small.generate(model, small.make_prompts(2, 40), cache, 2)
        assert all(s.token_count() for s in cache.sequences)
        cache.reset()


def test_what_is_kept_has_room_for_no_more_than_max_tokens(address, model):
    cache = WaveKVCache(model.config, address, max_tokens=48, full_attention=FOREVER)
    prompts = small.make_prompts(1, 40)
    small.assert_same_logits(model, prompts, small.generate(model, prompts, cache, 9))
    assert cache.local_bytes == 48 * BYTES_A_COLUMN


@pytest.mark.parametrize("fallback", [False, True])
def test_what_is_kept_has_room_for_no_more_than_the_limit(address, model, fallback):
    cache = WaveKVCache(
        model.config, address, max_tokens=1000, full_attention=50, fallback=fallback
    )
    small.generate(model, small.make_prompts(1, 40), cache, 5)
    # For the fallback the states stay when the limit is passed.
    columns = 41 + 256 if fallback else 50
    assert cache.local_bytes == columns * BYTES_A_COLUMN


@pytest.mark.parametrize("limit", ["never", FOREVER])
def test_a_short_last_chunk_of_a_prompt_leaves_no_room(address, model, limit):
    prompts = small.make_prompts(1, 101)
    cache = WaveKVCache(model.config, address, full_attention=limit)
    with torch.no_grad():
        for ids in prompts.ids[:, :100].split(40, dim=1):
            model(ids, past_key_values=cache)
    assert cache.local_bytes == 100 * BYTES_A_COLUMN
    small.assert_same_logits(model, prompts, small.generate(model, prompts, cache, 4))


def test_a_fallback_that_began_with_the_prompt_has_room_for_tokens(private_daemon, model):
    address, daemon = private_daemon
    prompts = small.make_prompts(1, 41)
    cache = WaveKVCache(model.config, address, max_tokens=1000, deadline=2.0, fallback=True)
    with torch.no_grad():
        model(prompts.ids[:, :20], past_key_values=cache)
        daemon.kill()
        with pytest.warns(RuntimeWarning, match=address):
            model(prompts.ids[:, 20:40], past_key_values=cache)
    small.assert_same_logits(model, prompts, small.generate(model, prompts, cache, 4))
    assert cache.local_bytes == (41 + 256) * BYTES_A_COLUMN


def test_closing_returns_everything(private_daemon, model):
    address, _ = private_daemon
    with wavekv.connect(address) as session:
        cache = WaveKVCache(model.config, session=session, max_tokens=256, full_attention=99)
        small.generate(model, small.make_prompts(2, 30), cache, 4, num_beams=2)
        assert len(listed(address)) == 4
        cache.close()
        assert not listed(address)


def test_a_daemon_that_dies_is_not_missed_before_the_limit(private_daemon, model):
    address, daemon = private_daemon
    prompts = small.make_prompts(2, 30, padding=[3])
    cache = WaveKVCache(model.config, address, max_tokens=256, deadline=2.0, full_attention=39)
    made = generate_and(model, prompts, cache, daemon.kill)  # Of ten tokens nine are kept.
    small.assert_same_logits(model, prompts, made)
    with pytest.raises(wavekv.WaveKVError, match=address), torch.no_grad():
        model(prompts.ids[:, :1], past_key_values=cache)
    with pytest.raises(wavekv.FailedPreconditionError, match="lost the daemon"), torch.no_grad():
        model(prompts.ids[:, :1], past_key_values=cache)


def test_with_the_fallback_it_goes_on_beyond_the_limit(private_daemon, model):
    address, daemon = private_daemon
    prompts = small.make_prompts(2, 30, padding=[3])
    cache = WaveKVCache(
        model.config, address, max_tokens=256, deadline=2.0, full_attention=36, fallback=True
    )
    with pytest.warns(RuntimeWarning, match=address):
        made = generate_and(model, prompts, cache, daemon.kill)
    small.assert_same_logits(model, prompts, made)


def test_rows_are_attached_beyond_the_limit(address, model, device):
    prompts = small.make_prompts(2, 37, padding=[9, 0])
    cache = WaveKVCache(model.config, address, full_attention=41)
    made = small.generate(model, prompts, cache, 4)
    assert not device.attachments
    small.assert_same_logits(model, prompts, made)
    longer = small.Prompts(made.sequences, torch.ones(2, 41, dtype=torch.long))
    longer.mask[0, :9] = 0
    small.assert_same_logits(model, longer, small.generate(model, longer, cache, 6))
    assert (device.attachments, device.tokens_begun) == (2, 5)


def test_no_graph_is_captured_of_what_is_attended_here(address, model, device):
    cache = WaveKVCache(model.config, address, full_attention=40)
    small.generate(model, small.make_prompts(1, 37), cache, 2)
    with pytest.raises(wavekv.FailedPreconditionError, match="full_attention='never'"):
        with cache.capturing():
            pytest.fail("inside")
    small.generate(model, small.make_prompts(1, 42), cache, 2)
    with cache.capturing() as captured, torch.no_grad():
        model(torch.tensor([[5]]), position_ids=torch.tensor([[43]]), past_key_values=cache)
    assert captured.complete
    # A reset gives the tokens back to the process: what is said must not lead in a circle.
    cache.reset()
    for call in (captured.advance, lambda: cache.capturing().__enter__()):
        with pytest.raises(wavekv.FailedPreconditionError, match="apture.*full_attention='never'"):
            call()
    small.generate(model, small.make_prompts(1, 37), cache, 2)
    for call in (captured.advance, lambda: cache.capturing().__enter__()):
        with pytest.raises(wavekv.FailedPreconditionError, match="exactly here.*='never' to capture"):
            call()


def test_a_gpu_is_what_makes_auto_attend_here(address, model, monkeypatch):
    prompts = small.make_prompts(1, 30)
    cache = WaveKVCache(model.config, address)
    small.generate(model, prompts, cache, 3)
    assert cache.sequences[0].token_count() > 0
    memory = 1 << 30
    monkeypatch.setattr(full, "on_gpu", lambda states: True)
    monkeypatch.setattr(full, "device_memory", lambda states: memory)
    cache = WaveKVCache(model.config, address)
    small.assert_same_logits(model, prompts, small.generate(model, prompts, cache, 3))
    assert cache.sequences[0].token_count() == 0
    # A quarter of the memory does not hold the prompt's keys and values.
    memory = 4 * 1024 * 2 * 2 * 2 * 32 * 4 - 1
    longer = small.make_prompts(1, 1025)
    cache = WaveKVCache(model.config, address)
    small.generate(model, longer, cache, 1)
    assert cache.sequences[0].token_count() > 0
    # It does, but the resident path is faster.
    memory = 1 << 30
    monkeypatch.setattr(full, "full_attention_tokens_max", lambda shape, batch, most: 20 * batch)
    cache = WaveKVCache(model.config, address)
    small.generate(model, prompts, cache, 3)
    assert cache.sequences[0].token_count() > 0
    never = WaveKVCache(model.config, address, full_attention="never")
    small.generate(model, small.make_prompts(1, 9), never, 3)
    assert never.sequences[0].token_count() > 0


@pytest.mark.parametrize("wrong", ["always", -1, 1.5, True, None])
def test_anything_else_is_refused(address, model, wrong):
    with pytest.raises(wavekv.InvalidArgumentError, match="full_attention is .*'auto', 'never' or"):
        WaveKVCache(model.config, address, full_attention=wrong)


def test_kept_states_are_what_was_appended():
    """Against tensors that are put together anew each time, in a random order of operations."""
    shape = (2, 3, 4)  # Rows, heads, dim.
    new = lambda rows, n: torch.randn(rows, shape[1], n, shape[2])  # noqa: E731
    known = [(KeptStates(), None)]
    for _ in range(2000):
        i = random.randrange(len(known))
        kept, plain = known[i]
        what = random.choice(["append", "append", "append", "crop", "select", "fork"])
        if plain is None or what == "append":
            rows = shape[0] if plain is None else len(plain[0])
            columns = random.choice([1, 1, 1, 2, 40])
            keys, values = new(rows, columns), new(rows, columns)
            found = kept.append(keys, values, random.choice([0, 300, 10**6]))
            if plain is None:
                plain = keys, values
            else:
                pairs = zip(plain, (keys, values), strict=True)
                plain = tuple(torch.cat(pair, dim=2) for pair in pairs)
            assert all(torch.equal(*pair) for pair in zip(found, plain, strict=True))
        elif what == "crop":
            columns = random.randint(0, plain[0].shape[2])
            kept.crop(columns)
            plain = tuple(states[:, :, :columns] for states in plain)
        elif what == "select":
            rows = [random.randrange(len(plain[0])) for _ in range(random.randint(1, 4))]
            kept.select(rows)
            plain = tuple(states[rows] for states in plain)
        known[i] = (kept, plain)
        if what == "fork":
            del known[5:]
            known.insert(0, (kept.fork(), plain))
        for one, expected in known:
            if expected is not None:
                assert all(torch.equal(*pair) for pair in zip(one.states, expected, strict=True))
