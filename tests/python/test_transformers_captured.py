"""A decode pass in a CUDA graph: what is captured, what is counted before a replay, what is refused.

No GPU here: a stand-in attends, and a stand-in for a graph does again what it saw.
"""

import types

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch_models as small  # noqa: E402
import wavekv  # noqa: E402
from resident_stand_in import StandInGraph, device, state  # noqa: E402, F401
from wavekv.transformers import UnsupportedModelError, WaveKVCache  # noqa: E402


pytestmark = pytest.mark.usefixtures("fresh_seed")


class Decoder:
    """A greedy generation, whose tokens come from passes of the model or from a graph of one."""

    def __init__(self, model, prompts, cache, device):
        self.cache = cache
        self.captured = None
        self._model = model
        self._device = device
        self._prompts = prompts
        positions = small.positions_of(prompts.mask)
        logits = model(
            prompts.ids, attention_mask=prompts.mask, position_ids=positions, past_key_values=cache
        ).logits
        self._position = positions[:, -1:].clone()
        self._token = torch.empty_like(self._position)
        self._made, self._logits = [], []
        self._take(logits)

    def step(self):
        """One token without a graph."""
        self._take(self._pass(attention_mask=self._mask()))

    def extend(self, tokens):
        """The next message: several random tokens, in place of the one that was chosen."""
        ids = small.make_prompts(len(self._token), tokens).ids
        self._made[-1] = ids
        mask = torch.cat([self._mask(), torch.ones_like(ids)], dim=1)[:, :-1]
        positions = self._position + torch.arange(tokens)
        logits = self._model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=self.cache
        ).logits
        self._logits.extend(logits[:, :-1].unbind(1))
        self._position += tokens - 1
        self._take(logits)

    def capture(self):
        self._graph = StandInGraph(self._device)
        with self.cache.capturing() as self.captured, self._graph:
            self._static_logits = self._pass()

    def replay(self):
        self.captured.advance()
        self._graph.replay()
        self._take(self._static_logits)

    @property
    def made(self):
        """As small.assert_same_logits wants it."""
        sequences = torch.cat([self._prompts.ids, *self._made], dim=1)
        return types.SimpleNamespace(sequences=sequences, logits=self._logits)

    def _mask(self):
        mask = torch.ones(len(self._token), self.cache.get_seq_length() + 1, dtype=torch.long)
        mask[:, : self._prompts.mask.shape[1]] = self._prompts.mask
        return mask

    def _pass(self, **options):
        return self._model(
            self._token, position_ids=self._position, past_key_values=self.cache, **options
        ).logits

    def _take(self, logits):
        self._logits.append(logits[:, -1].clone())
        self._made.append(self._logits[-1].argmax(-1, keepdim=True))
        self._token.copy_(self._made[-1])
        self._position += 1


@pytest.fixture
def decoder(address, model, device):
    """After a prompt, one row of it padded, and one token without a graph."""
    prompts = small.make_prompts(2, 37, padding=[9, 0])
    with torch.inference_mode():
        decoder = Decoder(model, prompts, WaveKVCache(model.config, address), device)
        decoder.prompts = prompts
        decoder.step()
        yield decoder


def test_a_graph_decodes_what_passes_do(decoder, model, device):
    decoder.capture()
    assert (device.tokens_reserved, device.tokens_begun) == (1, 1)  # A capture is no token.
    for _ in range(5):
        decoder.replay()
    decoder.step()
    for _ in range(3):
        decoder.replay()
    assert decoder.cache.get_seq_length() == 37 + 10
    assert (device.tokens_reserved, device.tokens_begun) == (10, 10)
    assert [sequence.token_count() for sequence in decoder.cache.sequences] == [47 - 9, 47]
    small.assert_same_logits(model, decoder.prompts, decoder.made)


def test_an_advance_waits_for_room(decoder, device):
    decoder.capture()
    device.room = 0
    device.states = [state(0), state(3)]
    decoder.replay()
    assert not device.states
    assert device.room == 2


def test_a_replay_over_nothing_is_found_by_the_next_advance(decoder, device):
    decoder.capture()
    decoder.replay()
    device.outcome = "closed"
    with pytest.raises(wavekv.UnavailableError, match="before a replay.*attended over nothing"):
        decoder.replay()
    with pytest.raises(wavekv.FailedPreconditionError, match="make a new one"):
        decoder.replay()


def test_a_cache_whose_steps_are_not_on_the_gpu_is_refused(address, model, device):
    prompts = small.make_prompts(1, 30)
    for options, taken in [({}, 0), ({"resident": False}, 1)]:
        decoder = Decoder(model, prompts, WaveKVCache(model.config, address, **options), device)
        for _ in range(taken):
            decoder.step()
        with pytest.raises(wavekv.FailedPreconditionError, match="take a token after the prompt"):
            decoder.capture()
    decoder = Decoder(model, prompts, WaveKVCache(model.config, address, fallback=True), device)
    decoder.step()
    with pytest.raises(wavekv.FailedPreconditionError, match="make the cache without it"):
        decoder.capture()


@pytest.mark.parametrize("change", ["crop", "fork", "reorder", "several tokens", "reset"])
def test_no_replay_while_the_rows_are_elsewhere(decoder, model, device, change):
    decoder.capture()
    decoder.replay()
    cache, old = decoder.cache, decoder.captured
    if change == "crop":
        cache.crop(38)
    elif change == "fork":
        cache.fork()
    elif change == "reorder":
        cache.reorder_cache(torch.tensor([1, 0]))
    elif change == "several tokens":
        model(torch.ones(2, 2, dtype=torch.long), attention_mask=torch.cat(
            [decoder.prompts.mask, torch.ones(2, cache.get_seq_length() - 37 + 2)], dim=1
        ), past_key_values=cache)  # fmt: skip
    else:
        cache.reset()
    columns = cache.get_seq_length()
    cure = "Capture another" if change == "reset" else "bring them back"
    with pytest.raises(
        wavekv.FailedPreconditionError, match=f"not on the GPU any more.*{cure}"
    ):
        old.advance()
    assert cache.get_seq_length() == columns
    assert not device.attached


def test_a_graph_goes_on_after_the_next_prompt(decoder, model, device):
    decoder.capture()
    decoder.replay()
    decoder.extend(40)
    decoder.step()
    assert device.attachments == 4
    for _ in range(3):
        decoder.replay()
    assert decoder.cache.get_seq_length() == 37 + 2 + 40 + 4
    assert (device.tokens_reserved, device.tokens_begun) == (6, 6)
    small.assert_same_logits(model, decoder.prompts, decoder.made)


@pytest.mark.parametrize("change", ["reset", "fewer rows"])
def test_other_rows_need_a_graph_of_their_own(decoder, model, device, change):
    decoder.capture()
    cache = decoder.cache
    kept = 1 if change == "fewer rows" else 2
    if change == "reset":
        cache.reset()
    else:
        cache.batch_select_indices(torch.tensor([1]))
    ids = small.make_prompts(kept, 40).ids
    model(ids, past_key_values=cache)
    model(ids[:, :1], past_key_values=cache)
    assert len(device.attached) == kept
    with pytest.raises(wavekv.FailedPreconditionError, match="other rows.*Capture again"):
        decoder.captured.advance()


def test_only_one_pass_of_one_token_is_captured(decoder, model):
    cache = decoder.cache
    one = torch.ones(2, 1, dtype=torch.long)

    def call(ids, **options):
        return lambda: model(ids, position_ids=one, past_key_values=cache, **options)

    for inside, error, text in [
        (lambda: None, wavekv.FailedPreconditionError, "0 of 2 layers"),
        (call(one.expand(2, 2)), wavekv.FailedPreconditionError, "pass of 2 tokens"),
        (lambda: (call(one)(), call(one)()), wavekv.FailedPreconditionError, "after 2 of 2 layers"),
        (call(one, attention_mask=torch.zeros(2, 1, 1, 39)), UnsupportedModelError, "mask inside"),
        (lambda: cache.crop(5), wavekv.FailedPreconditionError, "crop.. inside"),
        (lambda: cache.fork(), wavekv.FailedPreconditionError, "fork.. inside"),
        (lambda: cache.close(), wavekv.FailedPreconditionError, "close.. inside"),
        (lambda: cache.capturing().__enter__(), wavekv.FailedPreconditionError, "capturing.. inside"),
        (lambda: captured.advance(), wavekv.FailedPreconditionError, "advance.. inside"),
    ]:
        with pytest.raises(error, match=text), cache.capturing() as captured:
            inside()
        with pytest.raises(wavekv.FailedPreconditionError, match="whose capture failed"):
            captured.advance()
    assert cache.get_seq_length() == 38
    decoder.capture()
    decoder.replay()
    assert cache.get_seq_length() == 39
