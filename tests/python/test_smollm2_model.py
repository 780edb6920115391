"""The example's own parts: numpy attention against a float64 oracle, the tokenizer, document cutting."""

import numpy as np
import pytest
from smollm2_attention import ExactAttention
from smollm2_model import SmolLM2
from smollm2_text import read_document

HEADS, KV_HEADS, DIM = 9, 3, 64


@pytest.fixture(scope="module")
def model():
    return SmolLM2.load(kv_dtype="float16")


@pytest.mark.parametrize(
    "past, new",
    # The first token; inside one tile; across tiles; a block longer than a tile; one after many.
    [(0, 1), (0, 5), (0, 700), (1, 130), (513, 300), (1100, 1)],
)
def test_attention_equals_the_oracle(past, new):
    seed = np.random.SeedSequence().entropy
    rng = np.random.default_rng(seed)
    q = rng.standard_normal((new, HEADS, DIM), np.float32) * 3
    k, v = rng.standard_normal((2, past + new, KV_HEADS, DIM), np.float32) * 3
    group = HEADS // KV_HEADS
    wide_k, wide_v = (np.repeat(a, group, 1).astype(np.float64) for a in (k, v))
    logits = np.einsum("qhd,khd->hqk", q.astype(np.float64), wide_k) / np.sqrt(DIM)
    hidden = np.arange(past + new)[None] > np.arange(past, past + new)[:, None]
    logits[:, hidden] = -np.inf
    weights = np.exp(logits - logits.max(2, keepdims=True))
    weights /= weights.sum(2, keepdims=True)
    wanted = np.einsum("hqk,khd->qhd", weights, wide_v)

    block = ExactAttention(1, HEADS, KV_HEADS, DIM, past + new)
    block.append(0, k[:past], v[:past])
    # float32 sums over up to 1,100 terms of magnitude 10.
    np.testing.assert_allclose(block.block(0, q, k[past:], v[past:]), wanted, atol=3e-4, err_msg=str(seed))
    step = ExactAttention(1, HEADS, KV_HEADS, DIM, past + new)
    step.append(0, k[:-1], v[:-1])
    np.testing.assert_allclose(step(0, q[-1], k[-1], v[-1]), wanted[-1], atol=3e-4, err_msg=str(seed))


@pytest.mark.parametrize(
    "text",
    ["naïve café — 東京 \t\tx\r\n  12345 don't", "<|im_start|>user\nhi<|im_end|>\n", ""],
)
def test_text_survives_the_tokenizer(model, text):
    tokens = model.tokenizer.encode(text).ids
    assert model.tokenizer.decode(tokens, skip_special_tokens=False) == text


def test_steps_give_the_logits_of_a_block(model):
    tokens = model.tokenizer.encode("The quick brown fox jumps over the lazy dog. " * 8).ids
    cut = len(tokens) - 4
    block = model.prefill(tokens, n_logits=4)
    cache = model.exact_attention(len(tokens))
    stored = []
    model.prefill(tokens[:cut], lambda layer, k, v: stored.append(k.shape[0]), cache=cache)
    assert stored == [cut] * model.config.n_layers
    for i in range(4):
        step = model.step(tokens[cut + i], cut + i, cache)
        # Rounding of K and V to float16 may flip with the order of sums: logits differ by a little.
        np.testing.assert_allclose(step, block[i], atol=0.1)
        assert step.argmax() == block[i].argmax()


def test_documents_are_cut_or_refused(model, tmp_path):
    path = tmp_path / "text"
    path.write_text("one two three four five six seven eight nine ten")
    document = read_document(path, model.tokenizer, 4, 3, 1, 8192)
    assert (len(document.prefill), len(document.inputs)) == (4, 3)
    assert document.inputs[1:] == document.targets[:-1]
    with pytest.raises(ValueError, match="choose a longer text"):
        read_document(path, model.tokenizer, 400, 3, 1, 8192)
    with pytest.raises(ValueError, match="do not fit the context"):
        read_document(path, model.tokenizer, 8000, 300, 1, 8192)
