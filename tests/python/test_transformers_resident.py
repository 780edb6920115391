"""Steps on a GPU as the cache takes them: when it attaches and leaves, and what errors it makes.

No GPU here: a stand-in attends (resident_stand_in.py). What the kernels compute is for the tests of
client/gpu.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch_models as small  # noqa: E402
import wavekv  # noqa: E402
from resident_stand_in import device, state  # noqa: E402, F401
from wavekv.transformers import WaveKVCache, resident, rows  # noqa: E402


pytestmark = pytest.mark.usefixtures("fresh_seed")


def test_a_generation_attaches_once_and_steps_there(address, model, device):
    prompts = small.make_prompts(3, 37, padding=[9, 0, 30])
    cache = WaveKVCache(model.config, address, cache_ratio=0.25)
    made = small.generate(model, prompts, cache, 8)
    small.assert_same_logits(model, prompts, made)
    assert device.attachments == 3
    assert device.cache_ratio == 0.25
    assert device.tokens_begun == 7  # The first token is the prompt's.
    assert cache.device_bytes == 3000
    cache.close()
    assert cache.device_bytes == 0
    assert not device.attached


def test_the_next_message_attaches_again(address, model, device):
    prompts = small.make_prompts(1, 40)
    cache = WaveKVCache(model.config, address)
    made = small.generate(model, prompts, cache, 6)
    more = torch.cat([made.sequences, small.make_prompts(1, 50).ids], dim=1)
    prompts = small.Prompts(more, torch.ones_like(more))
    made = small.generate(model, prompts, cache, 6)
    small.assert_same_logits(model, prompts, made)
    assert device.attachments == 2
    assert len(device.attached) == 1


CHANGES = pytest.mark.parametrize("change", ["crop", "fork", "reorder", "several tokens"])


def changed(model, cache, made, change, kept):
    """Crops to `kept` columns after a change. Returns the cache, and prompts of one token more."""
    if change == "fork":
        cache = cache.fork()
    elif change == "reorder":
        cache.reorder_cache(torch.tensor([1, 0]))
        made.sequences = made.sequences[[1, 0]]
    elif change == "several tokens":
        with torch.no_grad():
            model(made.sequences[:, -3:], past_key_values=cache)
    cache.crop(kept)
    ones = torch.ones(2, kept + 1, dtype=torch.long)
    return cache, small.Prompts(made.sequences[:, : kept + 1], ones)


@CHANGES
def test_a_change_of_the_rows_leaves_until_the_next_prompt(address, model, device, change):
    prompts = small.make_prompts(2, 40)
    cache = WaveKVCache(model.config, address)
    made = small.generate(model, prompts, cache, 6)
    assert len(device.attached) == 2
    cache, again = changed(model, cache, made, change, kept=44)
    assert not device.attached
    made = small.generate(model, again, cache, 4)
    small.assert_same_logits(model, again, made)
    assert device.attachments == 2


@CHANGES
def test_tokens_that_follow_each_other_attach_again(address, model, device, change):
    prompts = small.make_prompts(2, 40)
    cache = WaveKVCache(model.config, address)
    made = small.generate(model, prompts, cache, 6)
    cache, again = changed(model, cache, made, change, kept=44)
    made = small.generate(model, again, cache, rows.TOKENS_BEFORE_ATTACHING)
    assert not device.attached
    cache, again = changed(model, cache, made, "crop", kept=50)  # They begin to count anew.
    made = small.generate(model, again, cache, rows.TOKENS_BEFORE_ATTACHING + 4)
    small.assert_same_logits(model, again, made)
    assert device.attachments == 4
    assert device.tokens_begun == 5 + 4  # The first token of a generation is read, too.


def test_an_order_that_changes_nothing_ends_nothing(address, model, device):
    cache = WaveKVCache(model.config, address)
    small.generate(model, small.make_prompts(2, 40), cache, 3)
    cache.reorder_cache(torch.tensor([0, 1]))
    assert len(device.attached) == 2


def test_what_cannot_be_attached_again_is_no_error(address, model, device):
    cache = WaveKVCache(model.config, address, resident=True)
    made = small.generate(model, small.make_prompts(2, 40), cache, 6)
    device.refuses = {3: wavekv.ResourceExhaustedError("others have its memory")}
    cache, again = changed(model, cache, made, "crop", kept=44)
    with pytest.warns(RuntimeWarning, match="others have its memory"):
        made = small.generate(model, again, cache, rows.TOKENS_BEFORE_ATTACHING + 4)
    small.assert_same_logits(model, again, made)
    assert device.attachments == 3


def test_what_was_refused_is_not_asked_for_again(address, model, device):
    device.refuses = {1: wavekv.FailedPreconditionError("the wave buffer is host memory")}
    with pytest.warns(RuntimeWarning, match="host memory"):
        small.generate(
            model, small.make_prompts(1, 30), WaveKVCache(model.config, address),
            3 * rows.TOKENS_BEFORE_ATTACHING,
        )  # fmt: skip
    assert device.attachments == 1


def test_beam_search_leaves_at_the_first_reordering(address, model, device):
    prompts = small.make_prompts(1, 30)
    cache = WaveKVCache(model.config, address)
    made = small.generate(
        model, prompts, cache, 8, num_beams=3, output_scores=True, length_penalty=0.0
    )
    small.assert_beam_scores(model, prompts, made)
    assert device.attachments == 3
    assert not device.attached


def test_a_full_ring_waits_for_the_daemon(address, model, device):
    device.room = 2
    device.states = [state(0), state(0), state(3), state(9)]
    prompts = small.make_prompts(1, 30)
    made = small.generate(model, prompts, WaveKVCache(model.config, address), 8)
    small.assert_same_logits(model, prompts, made)
    assert not device.states


def test_a_ring_that_stays_full_ends_at_the_deadline(address, model, device):
    device.room = 0
    device.states = [state(0)] * 10**5
    cache = WaveKVCache(model.config, address, deadline=0.3)
    with pytest.raises(wavekv.UnavailableError, match="did not go on for 0.3 s"):
        small.generate(model, small.make_prompts(1, 30), cache, 8)
    assert cache.failure is not None


def test_an_attachment_that_has_ended_is_an_error(address, model, device):
    device.room = 3
    device.states = [state(0, wavekv.FailedPreconditionError("the wave buffer was restarted"))]
    cache = WaveKVCache(model.config, address)
    with pytest.raises(wavekv.FailedPreconditionError, match="the wave buffer was restarted"):
        small.generate(model, small.make_prompts(1, 30), cache, 8)
    with pytest.raises(wavekv.FailedPreconditionError, match="make a new one"), torch.no_grad():
        model(torch.tensor([[3]]), past_key_values=cache)


def test_a_step_over_nothing_is_an_error(address, model, device):
    device.outcome = "closed"
    cache = WaveKVCache(model.config, address)
    with pytest.raises(wavekv.UnavailableError, match="row 0 attended over nothing .* closed"):
        small.generate(model, small.make_prompts(1, 30), cache, 8)


def test_a_last_token_over_nothing_is_an_error_when_the_cache_is_closed(address, model, device):
    cache = WaveKVCache(model.config, address)
    small.generate(model, small.make_prompts(2, 30), cache, 4)
    device.outcome = "does not fit"
    with pytest.raises(wavekv.UnavailableError, match="row 0 attended over nothing"):
        cache.close()
    assert not device.attached


def test_what_came_of_nothing_is_not_gone_on_with(address, model, device):
    device.outcome = "malformed"
    cache = WaveKVCache(model.config, address, fallback=True)
    with pytest.raises(wavekv.UnavailableError, match="attended over nothing"):
        small.generate(model, small.make_prompts(1, 30), cache, 8)


def test_a_daemon_that_fails_leaves_exact_attention(address, model, device):
    device.room = 3
    device.states = [state(0, wavekv.UnavailableError("the daemon is gone"))]
    prompts = small.make_prompts(1, 30)
    cache = WaveKVCache(model.config, address, fallback=True)
    with pytest.warns(RuntimeWarning, match="the daemon is gone.*exact attention"):
        made = small.generate(model, prompts, cache, 8)
    small.assert_same_logits(model, prompts, made)


def test_what_cannot_be_attached_goes_through_host_memory(address, model, device):
    device.refuses = {2: wavekv.FailedPreconditionError("the wave buffer is host memory")}
    prompts = small.make_prompts(2, 30)
    with pytest.warns(RuntimeWarning, match="host memory, which is slower.*resident=False"):
        made = small.generate(model, prompts, WaveKVCache(model.config, address), 6)
    small.assert_same_logits(model, prompts, made)
    assert not device.attached and not device.tokens_begun
    device.refuses = {device.attachments + 1: wavekv.FailedPreconditionError("host memory")}
    with pytest.raises(wavekv.FailedPreconditionError, match="host memory"):
        small.generate(model, prompts, WaveKVCache(model.config, address, resident=True), 6)


def test_a_fork_with_a_budget_of_its_own_goes_through_host_memory(address, model, device):
    prompts = small.make_prompts(1, 50)
    prompt = WaveKVCache(model.config, address, budget=wavekv.Budget.ratio(0.1))
    with torch.no_grad():
        model(prompts.ids[:, :40], past_key_values=prompt)
    with pytest.warns(RuntimeWarning, match="the budget is that of the sequence"):
        small.generate(model, prompts, prompt.fork(wavekv.Budget.clusters(9)), 3)
    assert not device.tokens_begun
    made = small.generate(model, prompts, prompt.fork(), 3)
    small.assert_same_logits(model, prompts, made)
    assert device.tokens_begun


def test_steps_on_the_gpu_can_be_declined(address, model, device):
    prompts = small.make_prompts(1, 30)
    cache = WaveKVCache(model.config, address, resident=False)
    made = small.generate(model, prompts, cache, 6)
    small.assert_same_logits(model, prompts, made)
    assert not device.attachments


def test_tensors_are_lent_without_ordering_streams():
    states = torch.arange(6.0)
    # Asked for a stream, torch refuses a tensor of the CPU; on a GPU it would make events.
    borrowed = torch.utils.dlpack.from_dlpack(resident.Ordered(states).__dlpack__(stream=1234))
    assert borrowed.data_ptr() == states.data_ptr()
    assert torch.equal(borrowed, states)
