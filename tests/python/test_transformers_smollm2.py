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


def test_smollm2_in_transformers_equals_exact_attention(address):
    done = subprocess.run(
        [sys.executable, EXAMPLES / "transformers_generate.py", "--address", address,
         "--document", DOCUMENT, "--prefill-tokens", "3000", "--score-tokens", "256",
         "--decode-tokens", "32", "--json"],
        capture_output=True, text=True, timeout=900,
        # Threads that wait for each other must not take the daemon's cores.
        env={**os.environ, "OMP_WAIT_POLICY": "PASSIVE"},
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["tokens_prefilled"] == 3000
    assert result["tokens_scored"] == 256
    assert abs(result["perplexity_wavekv"] / result["perplexity_exact"] - 1) <= 0.01
    assert result["next_token_agreement"] >= 0.98
    tie = result["first_tie_step"]
    assert result["first_tokens_equal"] >= (32 if tie is None else tie)
    assert result["perplexity_steady_only"] > 1.02 * result["perplexity_exact"]
    # Of 3,000 tokens the steady zone and the sketched clusters are a larger part than of 6,600.
    assert 0 < result["kv_bytes_read_ratio"] <= 0.2
    assert result["kv_bytes_device_wavekv"] == 0
