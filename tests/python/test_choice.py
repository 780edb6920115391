"""Which attention is faster on a GPU, as the package says it: the model itself is tested in C++
(tests/client/gpu/attention_choice_test.cc)."""

import random

import pytest
import wavekv

LLAMA_8B = wavekv.ModelShape(layers=32, query_heads=32, kv_heads=8, key_dim=128)


def test_a_short_context_is_for_full_attention_and_a_long_one_is_not():
    assert wavekv.estimate_attention(LLAMA_8B, 1, 32768).full_wins
    long = wavekv.estimate_attention(LLAMA_8B, 8, 122880, hit_ratio=1.0)
    assert not long.full_wins
    # Measured: bench/results/h200/gpu-attend.json.
    assert long.full_us == pytest.approx(870, rel=0.03)
    assert long.wave_us == pytest.approx(111, rel=0.03)


def test_the_limit_is_where_the_choice_changes():
    batch = random.randint(1, 64)
    limit = wavekv.full_attention_tokens_max(LLAMA_8B, batch, 1 << 20)
    assert limit % 1024 == 0 and 8192 < limit < 1 << 20
    assert wavekv.estimate_attention(LLAMA_8B, batch, limit).full_wins
    assert not wavekv.estimate_attention(LLAMA_8B, batch, limit + 1024).full_wins
    assert wavekv.full_attention_tokens_max(LLAMA_8B, batch, 5000) == 5000


def test_where_every_block_is_missed_it_is_full_attention():
    tokens = 1 << 20
    assert wavekv.full_attention_tokens_max(LLAMA_8B, 8, tokens, hit_ratio=0.0) == tokens
    # Unless the bus is as fast as the memory.
    assert wavekv.full_attention_tokens_max(
        LLAMA_8B, 8, tokens, hit_ratio=0.0, bus_bytes_per_s=4.57e12
    ) < tokens  # fmt: skip


def test_what_is_no_problem_is_refused():
    with pytest.raises(wavekv.InvalidArgumentError, match="batch is 0"):
        wavekv.estimate_attention(LLAMA_8B, 0, 1)
    with pytest.raises(wavekv.InvalidArgumentError, match="hit_ratio is 2"):
        wavekv.full_attention_tokens_max(LLAMA_8B, 1, 1, hit_ratio=2.0)
