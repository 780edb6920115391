"""A real model in transformers over a real document: exact attention beside WaveKV.

3,000 tokens, to be quick; docs/integrations/transformers.md has the numbers at 6,600. What is
compared is the same in every run: the document, the weights, and how the index is cut and built.
"""

import json
import os
import subprocess
import sys

import pytest
from conftest import EXAMPLES

pytest.importorskip("torch")
pytest.importorskip("transformers")

DOCUMENT = "/usr/share/common-licenses/GPL-3"
FIELDS = [
    "tokens_prefilled", "tokens_scored", "tokens_decoded", "first_tokens_equal", "first_tie_step",
    "next_token_agreement", "perplexity_exact", "perplexity_wavekv", "decode_tokens_per_s_exact",
    "decode_tokens_per_s_wavekv", "kv_bytes_device_exact", "kv_bytes_device_wavekv",
]  # fmt: skip


def run_example(*flags):
    """Returns what its last line says, and the lines before it by their names."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "transformers_generate.py", "--document", DOCUMENT, *flags,
         "--json"],
        capture_output=True, text=True, timeout=900,
        # Threads that wait for each other must not take the daemon's cores.
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    *lines, last = done.stdout.splitlines()
    result = json.loads(last)
    assert list(result) == FIELDS
    return result, dict(line.split(": ", 1) for line in lines)


def test_what_did_not_run_is_null():
    sizes = ["--prefill-tokens=40", "--score-tokens=8", "--decode-tokens=2"]
    result, lines = run_example("--attention=sdpa", *sizes)
    assert [result[f"tokens_{what}"] for what in ("prefilled", "scored", "decoded")] == [40, 8, 2]
    assert result["perplexity_exact"] > 1
    assert {name for name in FIELDS if result[name] is None} == {
        "first_tokens_equal", "first_tie_step", "next_token_agreement", "perplexity_wavekv",
        "decode_tokens_per_s_wavekv", "kv_bytes_device_wavekv",
    }  # fmt: skip
    assert "text_exact" in lines and "text_wavekv" not in lines


def test_smollm2_in_transformers_equals_exact_attention(address):
    result, lines = run_example(
        "--address", address, "--prefill-tokens", "3000", "--score-tokens", "256",
        "--decode-tokens", "32",
    )  # fmt: skip
    assert result["tokens_prefilled"] == 3000
    assert result["tokens_scored"] == 256
    assert abs(result["perplexity_wavekv"] / result["perplexity_exact"] - 1) <= 0.01
    assert result["next_token_agreement"] >= 0.98
    tie = result["first_tie_step"]
    assert result["first_tokens_equal"] >= (32 if tie is None else tie)
    assert float(lines["perplexity_steady_only"]) > 1.02 * result["perplexity_exact"]
    # Of 3,000 tokens the steady zone and the sketched clusters are a larger part than of 6,600.
    assert 0 < float(lines["kv_bytes_read_ratio"]) <= 0.2
    assert result["kv_bytes_device_wavekv"] == 0
