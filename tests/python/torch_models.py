"""Small models of random weights for the tests of wavekv.transformers, and how they are compared.

A greedy token of such a model may hang on the last bit of a logit, so tokens are never compared
with another run's: what WaveKV made is read again by exact attention, and the logits are compared.
"""

from __future__ import annotations

import dataclasses
import os
import random
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

OLD_TRANSFORMERS = transformers.__version__.startswith("4.")
VOCABULARY = 61
PAD = 0
# The end-of-sequence token is VOCABULARY, which no model can make: generations have their length.

# Everything is float32 and, up to a thousand tokens, attended exactly: two orders of summation of
# the same terms. Logits here are at most about 30, a float32 has 2^-24 relative, a logit gathers a
# few hundred roundings a layer, in two layers: 30 * 1000 * 6e-8 = 2e-3. Wrong tokens, a lost
# mask or a stale row move logits by whole units.
LOGITS_TOLERANCE = 5e-3

_COMMON = {
    "hidden_size": 128, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": 4096, "initializer_range": 0.2,
    "pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": VOCABULARY,
    "tie_word_embeddings": False,
}  # fmt: skip
# By family, what its config has beside the common sizes.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"num_key_value_heads": 2},
    "mistral": {"num_key_value_heads": 2, "sliding_window": None},
    "phi": {"num_key_value_heads": 4, "partial_rotary_factor": 1.0},
    "phi3": {"num_key_value_heads": 2},
    "qwen2": {"num_key_value_heads": 2},
    "qwen3": {"num_key_value_heads": 1, "head_dim": 32},
    "smollm3": {"num_key_value_heads": 2, "no_rope_layer_interval": 2},
}


def seed_everything() -> int:
    """Seeds torch freshly, or with WAVEKV_TEST_SEED; prints the seed for the failure's report."""
    seed = int(os.environ.get("WAVEKV_TEST_SEED", "0")) or random.randrange(1, 2**31)
    print(f"WAVEKV_TEST_SEED={seed}")
    torch.manual_seed(seed)
    return seed


def make_config(family: str, **changes: Any) -> Any:
    return CONFIG_MAPPING[family](**(_COMMON | FAMILIES.get(family, {}) | changes))


def make_model(family: str = "llama", **changes: Any) -> Any:
    """A model of random weights with the attention "wavekv"."""
    config = make_config(family, **changes)
    return AutoModelForCausalLM.from_config(config, attn_implementation="wavekv").eval()


def make_longrope_model(switch: int) -> Any:
    """A Phi-3 whose keys are rotated by other factors beyond `switch` tokens."""
    factors = {"short_factor": [1.0] * 16, "long_factor": [4.0] * 16}
    rope = {"rope_parameters": {"rope_type": "longrope", "rope_theta": 10000.0, **factors}}
    if OLD_TRANSFORMERS:
        rope = {"rope_scaling": {"type": "longrope", **factors}}
    return make_model(
        "phi3", original_max_position_embeddings=switch, max_position_embeddings=8 * switch, **rope
    )


@dataclasses.dataclass(frozen=True)
class Prompts:
    """Random prompts [batch, tokens] with padding at the left of some rows."""

    ids: torch.Tensor
    mask: torch.Tensor


def make_prompts(batch: int, tokens: int, padding: list[int] | None = None) -> Prompts:
    ids = torch.randint(3, VOCABULARY, (batch, tokens))
    mask = torch.ones_like(ids)
    for row, length in enumerate(padding or ()):
        ids[row, :length] = PAD
        mask[row, :length] = 0
    return Prompts(ids, mask)


def generate(model: Any, prompts: Prompts, cache: Any, new_tokens: int, **options: Any) -> Any:
    """Greedy unless `options` say otherwise; exactly new_tokens (no token ends it), with logits."""
    return model.generate(
        prompts.ids, attention_mask=prompts.mask, past_key_values=cache, do_sample=False,
        max_new_tokens=new_tokens, return_dict_in_generate=True, output_logits=True, **options,
    )  # fmt: skip


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Positions of the tokens of a batch with padding at the left, as `generate` counts them."""
    return (mask.cumsum(-1) - 1).clamp_min(0)


@torch.no_grad()
def exact_logits(model: Any, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Logits [batch, tokens, vocabulary] of one pass of transformers' own attention over all."""
    full = torch.cat([mask, mask.new_ones(len(ids), ids.shape[1] - mask.shape[1])], dim=1)
    positions = positions_of(full)
    model.set_attn_implementation("sdpa")
    try:
        return model(
            ids, attention_mask=full, position_ids=positions,
            past_key_values=DynamicCache(config=model.config),
        ).logits  # fmt: skip
    finally:
        model.set_attn_implementation("wavekv")


def assert_greedy(model: Any, prompts: Prompts, made: torch.Tensor) -> None:
    """Every token of `made` is one that exact attention, reading the same, likes best."""
    start = prompts.ids.shape[1]
    logits = exact_logits(model, made, prompts.mask)[:, start - 1 : -1]
    chosen = logits.gather(-1, made[:, start:, None])[..., 0]
    assert (logits.max(-1).values - chosen).max() <= 2 * LOGITS_TOLERANCE


def assert_same_logits(model: Any, prompts: Prompts, made: Any) -> None:
    """The logits of a generation are those of exact attention over what it generated."""
    start = prompts.ids.shape[1]
    expected = exact_logits(model, made.sequences, prompts.mask)[:, start - 1 : -1]
    found = torch.stack(made.logits, dim=1)
    assert expected.std() > 0.5  # A model that says something: differences would be seen.
    torch.testing.assert_close(found, expected, rtol=0, atol=LOGITS_TOLERANCE)


def assert_beam_scores(model: Any, prompts: Prompts, made: Any) -> None:
    """A beam (of length_penalty 0) is worth the sum of its own tokens' likelihoods.

    One that attended over another's tokens would be worth something else.
    """
    start = prompts.ids.shape[1]
    logits = exact_logits(model, made.sequences, prompts.mask)[:, start - 1 : -1]
    chosen = logits.log_softmax(-1).gather(-1, made.sequences[:, start:, None])
    tolerance = 2 * LOGITS_TOLERANCE * chosen.shape[1]
    torch.testing.assert_close(
        made.sequences_scores, chosen.sum((1, 2)), rtol=0, atol=tolerance
    )
