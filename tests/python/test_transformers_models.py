"""wavekv.transformers with small models: every family, every way to generate, every refusal."""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch_models as small  # noqa: E402
import wavekv  # noqa: E402
from daemons import ROOT  # noqa: E402
from torch.nn.attention.bias import CausalBias  # noqa: E402
from transformers import DynamicCache, StaticCache  # noqa: E402
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS  # noqa: E402
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS  # noqa: E402
from wavekv.transformers import SUPPORTED_MODELS, UnsupportedModelError, WaveKVCache  # noqa: E402


pytestmark = pytest.mark.usefixtures("fresh_seed")

DOCUMENT = ROOT / "docs" / "integrations" / "transformers.md"


def test_every_supported_family_is_tested():
    assert sorted(SUPPORTED_MODELS) == sorted(small.FAMILIES)


@pytest.mark.parametrize("family", small.FAMILIES)
def test_a_padded_batch_has_the_logits_of_exact_attention(address, family):
    model = small.make_model(family)
    prompts = small.make_prompts(3, 37, padding=[9, 0, 36])
    cache = WaveKVCache(model.config, address)
    made = small.generate(model, prompts, cache, 8)
    small.assert_same_logits(model, prompts, made)
    # 37 + 8 columns, the last token is never read; padding is not stored.
    assert cache.get_seq_length() == 44
    assert [s.token_count(1) for s in cache.sequences] == [44 - 9, 44, 44 - 36]
    assert cache.counters.steady_tokens > 0  # The daemon attended.
    assert cache.local_bytes == 0


def test_keys_of_bfloat16_are_stored_as_such(address):
    model = small.make_model().to(torch.bfloat16)
    prompts = small.make_prompts(2, 33, padding=[5])
    with pytest.raises(UnsupportedModelError, match="makes keys of torch.bfloat16"):
        small.generate(model, prompts, WaveKVCache(model.config, address, dtype=torch.float32), 2)
    cache = WaveKVCache(model.config, address, dtype=torch.bfloat16)
    made = small.generate(model, prompts, cache, 6)
    assert cache.sequences[0].shape.dtype == "bf16"
    # Both attend over bfloat16 and round each layer's output to it: 8 bits, logits below 32.
    found = torch.stack(made.logits, dim=1).float()
    expected = small.exact_logits(model, made.sequences, prompts.mask)[:, 32:-1].float()
    assert (found - expected).abs().mean() < 0.25


@pytest.mark.parametrize("chunk", [7, 40])
def test_a_prompt_fed_in_chunks(address, model, chunk):
    # 100 = 2 * 40 + 20: the short last chunk is still the prompt's.
    prompts = small.make_prompts(2, 100)
    cache = WaveKVCache(model.config, address)
    made = small.generate(model, prompts, cache, 5, prefill_chunk_size=chunk)
    small.assert_same_logits(model, prompts, made)


@pytest.mark.skipif(small.OLD_TRANSFORMERS, reason="it does not say where a chunk begins")
@pytest.mark.parametrize("cache_of", ["wavekv", "dynamic", "static"])
def test_a_chunk_of_a_prompt_makes_no_mask(address, model, cache_of, monkeypatch):
    prompts = small.make_prompts(2, 90)
    cache = {
        "wavekv": lambda: WaveKVCache(model.config, address),
        "dynamic": lambda: DynamicCache(config=model.config),
        "static": lambda: StaticCache(config=model.config, max_cache_len=100),
    }[cache_of]()
    masks = []
    make = ALL_MASK_ATTENTION_FUNCTIONS["wavekv"]
    monkeypatch.setitem(
        ALL_MASK_ATTENTION_FUNCTIONS, "wavekv",
        lambda **asked: masks.append(make(**asked)) or masks[-1],
    )  # fmt: skip
    with torch.no_grad():
        found = torch.cat(
            [model(ids, past_key_values=cache).logits for ids in prompts.ids.split(40, dim=1)], dim=1
        )
    expected = small.exact_logits(model, prompts.ids, prompts.mask)
    torch.testing.assert_close(found, expected, rtol=0, atol=small.LOGITS_TOLERANCE)
    # A static cache has columns after the newest token, which only a mask can hide.
    later = torch.Tensor if cache_of == "static" else CausalBias
    assert [mask if mask is None else type(mask) for mask in masks] == [None, later, later]


def test_a_padded_prompt_fed_in_chunks(address, model):
    """By hand, since generate of transformers 4.57 loses the padding's positions."""
    prompts = small.make_prompts(3, 120, padding=[0, 60, 40])  # More than a chunk is padding.
    positions = small.positions_of(prompts.mask)
    cache = WaveKVCache(model.config, address)
    with torch.no_grad():
        for start in range(0, 119, 40):
            end = min(start + 40, 119)
            model(
                prompts.ids[:, start:end], attention_mask=prompts.mask[:, :end],
                position_ids=positions[:, start:end], past_key_values=cache,
            )  # fmt: skip
    assert [s.token_count(1) for s in cache.sequences] == [119, 59, 79]
    assert cache.local_bytes > 0
    small.assert_same_logits(model, prompts, small.generate(model, prompts, cache, 5))
    assert cache.local_bytes == 0


def test_beam_search_forks(address, model):
    prompts = small.make_prompts(2, 30, padding=[4])
    cache = WaveKVCache(model.config, address)
    made = small.generate(
        model, prompts, cache, 10, num_beams=4, output_scores=True, length_penalty=0.0
    )
    small.assert_beam_scores(model, prompts, made)
    assert len(cache.sequences) == 8


def test_assisted_decoding_truncates(address, model):
    prompts = small.make_prompts(1, 50)
    prompts.ids[:, 25:] = prompts.ids[:, :25]  # Something for the look-up to guess from.
    cache = WaveKVCache(model.config, address)
    made = small.generate(model, prompts, cache, 16, prompt_lookup_num_tokens=3)
    small.assert_greedy(model, prompts, made.sequences)
    assert cache.sequences[0].generation > 1  # Guesses were taken back,
    assert cache.counters.steady_tokens > 0  # and verified by the daemon.


def test_assisted_by_a_model_with_a_cache_of_its_own(address, model):
    prompts = small.make_prompts(1, 40)
    assistant = small.make_model()
    assistant.set_attn_implementation("sdpa")
    made = small.generate(
        model, prompts, WaveKVCache(model.config, address), 12, assistant_model=assistant
    )
    small.assert_greedy(model, prompts, made.sequences)


def test_the_next_message_of_a_conversation(address, model):
    """A long pass after decoding: the daemon attends exactly over the past, we over what is new."""
    first = small.make_prompts(2, 48, padding=[20])
    cache = WaveKVCache(model.config, address)
    turn = small.generate(model, first, cache, 6)
    more = torch.randint(3, small.VOCABULARY, (2, 60))
    ids = torch.cat([turn.sequences, more], dim=1)
    second = small.Prompts(ids, torch.cat([first.mask, first.mask.new_ones(2, 66)], dim=1))
    made = small.generate(model, second, cache, 6)
    small.assert_same_logits(model, second, made)


def test_a_prompt_is_shared_by_forks(address, model):
    prompts = small.make_prompts(1, 64)
    prompt = WaveKVCache(model.config, address)
    with torch.no_grad():
        model(prompts.ids[:, :60], past_key_values=prompt)
    for _ in range(2):
        longer = small.Prompts(prompts.ids.clone(), prompts.mask)
        longer.ids[:, 60:] = torch.randint(3, small.VOCABULARY, (1, 4))
        made = small.generate(model, longer, prompt.fork(), 5)
        small.assert_same_logits(model, longer, made)
    assert prompt.get_seq_length() == 60


def test_a_cache_that_is_reset_is_as_new(address, model):
    cache = WaveKVCache(model.config, address)
    for batch, tokens in ((2, 30), (1, 20)):
        prompts = small.make_prompts(batch, tokens)
        small.assert_same_logits(model, prompts, small.generate(model, prompts, cache, 4))
        cache.reset()
        assert (cache.get_seq_length(), cache.sequences, cache.local_bytes) == (0, [], 0)


def test_rows_are_selected_and_cropped(address, model):
    prompts = small.make_prompts(3, 40, padding=[0, 12])
    cache = WaveKVCache(model.config, address)
    small.generate(model, prompts, cache, 4)
    cache.batch_select_indices(torch.tensor([2, 1]))
    cache.crop(-3)
    cache.batch_repeat_interleave(2)
    rows = [2, 2, 1, 1]
    chosen = small.Prompts(prompts.ids[rows], prompts.mask[rows])
    assert cache.get_seq_length() == 40
    more = torch.randint(3, small.VOCABULARY, (4, 3))
    ids = torch.cat([chosen.ids, more], dim=1)
    longer = small.Prompts(ids, torch.cat([chosen.mask, chosen.mask.new_ones(4, 3)], dim=1))
    small.assert_same_logits(model, longer, small.generate(model, longer, cache, 4))


def test_a_long_context_is_indexed_and_close(address, model):
    """2,600 tokens: two thirds of them are clustered, and a step reads less than all."""
    prompts = small.make_prompts(1, 2600)
    cache = WaveKVCache(model.config, address)
    small.generate(model, prompts, cache, 4)
    assert cache.counters.estimated_clusters > 0
    everything = WaveKVCache(model.config, address, budget=wavekv.Budget.ratio(1.0))
    made = small.generate(model, prompts, everything, 4)
    small.assert_same_logits(model, prompts, made)
    assert everything.counters.retrieved_tokens > 0


REFUSED = [
    # (what the config says, what the text names)
    (("mistral", {"sliding_window": 64}), "sliding window"),
    (("qwen2", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1}),
     "layers of kind sliding_attention"),
    (("gemma2", {"num_key_value_heads": 2}), "attn_logit_softcapping"),
    (("deepseek_v3", {}), "latent attention"),
    (("gpt_neox", {}), "not among those that are known to work"),
    (("llama", {"head_dim": 16}), "key_dim is 16"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "named"), REFUSED, ids=[row[1] for row in REFUSED])
def test_a_model_that_cannot_be_served_is_refused_by_name(address, config, named):
    family, changes = config
    made = small.make_config(family, **changes)
    made._attn_implementation = "wavekv"
    with pytest.raises(wavekv.InvalidArgumentError, match=named):
        WaveKVCache(made, address)


@pytest.mark.parametrize(("config", "named"), REFUSED[:-1], ids=[row[1] for row in REFUSED[:-1]])
def test_what_the_config_rules_out_is_refused_before_anyone_is_called(tmp_path, config, named):
    family, changes = config
    made = small.make_config(family, **changes)
    made._attn_implementation = "wavekv"
    with pytest.raises(UnsupportedModelError, match=named):
        WaveKVCache(made, f"unix:{tmp_path}/nobody")


# What a model may hand to its attention, by what the refusal says.
UNKNOWN = {
    "a soft cap of the logits": {"softcap": 30.0},
    "a sliding window": {"sliding_window": 16},
    "a position bias": {"position_bias": torch.zeros(1)},
    "attention sinks": {"s_aux": torch.zeros(4)},
    "output_attentions=True": {"output_attentions": True},
    "attention dropout of 0.1": {"dropout": 0.1},
}


@pytest.mark.parametrize("named", UNKNOWN)
def test_arithmetic_that_is_not_known_is_refused_when_it_shows(address, model, monkeypatch, named):
    attend = ALL_ATTENTION_FUNCTIONS["wavekv"]
    monkeypatch.setitem(
        ALL_ATTENTION_FUNCTIONS, "wavekv",
        lambda *states, **asked: attend(*states, **(asked | UNKNOWN[named])),
    )  # fmt: skip
    cache = WaveKVCache(model.config, address)
    with pytest.raises(UnsupportedModelError, match=named):
        small.generate(model, small.make_prompts(1, 8), cache, 2)
    assert not any(sequence.token_count() for sequence in cache.sequences)


def test_a_model_in_training_is_refused_for_its_dropout(address):
    model = small.make_model(attention_dropout=0.25).train()
    with pytest.raises(UnsupportedModelError, match="dropout of 0.25: call model.eval"):
        model(small.make_prompts(1, 8).ids, past_key_values=WaveKVCache(model.config, address))


def test_another_attention_is_refused_before_and_during_work(address, model):
    cache = WaveKVCache(model.config, address)
    model.set_attn_implementation("sdpa")
    with pytest.raises(wavekv.InvalidArgumentError, match="'sdpa', expected 'wavekv'"):
        WaveKVCache(model.config, address)
    with pytest.raises(RuntimeError, match="the attention 'wavekv' alone"):
        small.generate(model, small.make_prompts(1, 8), cache, 2)


def test_a_mask_with_holes_is_refused(address, model):
    prompts = small.make_prompts(2, 20)
    prompts.mask[1, -4:] = 0  # Padding at the right.
    with pytest.raises(UnsupportedModelError, match="holes"), torch.no_grad():
        model(
            prompts.ids, attention_mask=prompts.mask,
            past_key_values=WaveKVCache(model.config, address),
        )  # fmt: skip


def test_the_documents_three_lines(address, model, tmp_path):
    """As docs/integrations/transformers.md has them, but for the daemon's address."""
    text = DOCUMENT.read_text(encoding="utf-8")
    lines = text.split("```python\n", 1)[1].split("```", 1)[0]
    default = "unix:/run/wavekv/wavekvd.sock"
    assert lines.count(default) == 1
    model.save_pretrained(tmp_path)
    prompts = small.make_prompts(2, 30, padding=[3])
    names = {
        "path": str(tmp_path),
        "inputs": {"input_ids": prompts.ids, "attention_mask": prompts.mask},
    }
    exec(lines.replace(default, address), names)  # noqa: S102
    assert names["output"].shape == (2, 230)
    assert [s.token_count() for s in names["cache"].sequences] == [229 - 3, 229]
    small.assert_greedy(model, prompts, names["output"])


def test_without_a_wavekv_cache_it_is_sdpa(model):
    prompts = small.make_prompts(2, 30, padding=[3])
    small.assert_same_logits(model, prompts, small.generate(model, prompts, None, 4))


@pytest.mark.parametrize("whole", [False, True])
def test_a_compiled_model_is_refused_by_name(address, model, whole):
    cache = WaveKVCache(model.config, address)
    compiled = torch.compile(model.forward, backend="eager", fullgraph=whole)
    with pytest.raises(Exception, match="torch.compile cannot|without torch.compile"):
        compiled(small.make_prompts(2, 30).ids, past_key_values=cache)
    torch.compiler.reset()
    # The model itself is as it was.
    prompts = small.make_prompts(2, 30, padding=[3])
    cache = WaveKVCache(model.config, address)
    small.assert_same_logits(model, prompts, small.generate(model, prompts, cache, 2))


def test_a_model_compiled_in_place_is_refused_by_name(address, model):
    model.compile(backend="eager")
    prompts = small.make_prompts(2, 30)
    with pytest.raises(Exception, match="torch.compile cannot|without torch.compile"):
        small.generate(model, prompts, WaveKVCache(model.config, address), 2)
    torch.compiler.reset()


def test_a_long_prompt_of_phi3_longrope_is_served_to_its_end(address, recwarn):
    model = small.make_longrope_model(switch=48)
    prompts = small.make_prompts(2, 61, padding=[0, 7])
    cache = WaveKVCache(model.config, address)
    assert not cache
    made = small.generate(model, prompts, cache, 8)
    small.assert_same_logits(model, prompts, made)
    assert cache and cache.get_seq_length() == 61 + 8 - 1
    assert cache.counters.steady_tokens > 0
    assert not [warning for warning in recwarn if "dropped" in str(warning.message)]


def test_a_cache_that_phi3_longrope_drops_says_so(address):
    model = small.make_longrope_model(switch=48)
    prompts = small.make_prompts(1, 44)
    cache = WaveKVCache(model.config, address)
    dropped = "beyond 48 tokens .* dropped the WaveKVCache of 48"
    if not small.OLD_TRANSFORMERS:
        with pytest.raises(UnsupportedModelError, match=f"{dropped}.* the newest 1 alone"):
            small.generate(model, prompts, cache, 12)
        return
    with pytest.warns(RuntimeWarning, match=f"{dropped}.* reads all again"):
        made = small.generate(model, prompts, cache, 12)
    # As transformers rotates them: by one set of factors up to the switch, by the other beyond.
    before = small.exact_logits(model, made.sequences[:, :48], prompts.mask)[:, 43:]
    beyond = small.exact_logits(model, made.sequences[:, :-1], prompts.mask)[:, 48:]
    found = torch.stack(made.logits, dim=1)
    expected = torch.cat([before, beyond], dim=1)
    torch.testing.assert_close(found, expected, rtol=0, atol=small.LOGITS_TOLERANCE)


def test_another_cache_beside_one_that_may_be_dropped_is_left_alone(address, recwarn):
    model = small.make_longrope_model(switch=48)
    cache = WaveKVCache(model.config, address)
    small.generate(model, small.make_prompts(1, 20), cache, 4)
    prompts = small.make_prompts(1, 30)
    made = small.generate(model, prompts, DynamicCache(config=model.config), 8)
    small.assert_same_logits(model, prompts, made)
    assert cache.get_seq_length() == 23
    assert not [warning for warning in recwarn if "dropped" in str(warning.message)]
