"""bench/gpu/transformers_speed.py at a small size, without a GPU: it runs, and both sides agree."""

import json
import os
import pathlib
import subprocess
import sys

import pytest
from daemons import BIN

pytest.importorskip("torch")
pytest.importorskip("transformers")

import torch_models as small  # noqa: E402

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench" / "gpu" / "transformers_speed.py"
SMALL = [
    "--device=cpu", "--layers=2", "--heads=4", "--kv-heads=2", "--head-dim=64",
    "--intermediate=128", "--vocabulary=97", "--steps=2", "--change-every=1,0",
]  # fmt: skip


def run(*flags):
    return subprocess.run(
        [sys.executable, BENCH, *SMALL, *flags], capture_output=True, text=True, check=False,
        timeout=300, env={**os.environ, "WAVEKV_BIN_DIR": str(BIN), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


@pytest.mark.skipif(small.OLD_TRANSFORMERS, reason="the benchmark is for transformers 5.x")
def test_it_compares_and_reports(tmp_path):
    done = run("--batch=1,2", "--tokens=700", "--chunk=300", f"--out={tmp_path}/speed.json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "speed.json").read_text())
    assert [row["batch"] for row in report["rows"]] == [1, 2]
    for row in report["rows"]:
        # At 700 tokens all is attended exactly: two ways to the same logits, rounded to bf16.
        assert row["logits_cosine"] > 0.999
        # One column more than the prompt, two layers of two heads, keys and values of 2 bytes.
        assert row["sdpa"]["kv_bytes"] == row["batch"] * 701 * 2 * 2 * 64 * 4
        assert {"whole_graph", "static_graph", "dynamic"} < set(row["sdpa"])
        assert [one["change_every"] for one in row["wavekv"]["series"]] == [1, 0]
        assert "speedup" not in row  # Without a GPU there is no hit ratio to reach.


def test_what_does_not_fit_is_refused():
    done = run("--batch=64", "--tokens=90000000")
    assert done.returncode == 1
    assert "GiB of host memory" in done.stderr
