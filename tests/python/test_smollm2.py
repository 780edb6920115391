"""The main job: a real model over real documents, exact beside WaveKV."""

import json
import os
import subprocess
import sys

import pytest
from conftest import EXAMPLES
from daemons import BIN, ROOT

GPL3 = "/usr/share/common-licenses/GPL-3"


@pytest.fixture(scope="module")
def own_documents(tmp_path_factory):
    """The project's own docs and README joined: nobody has memorised those."""
    path = tmp_path_factory.mktemp("document") / "docs.md"
    parts = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    path.write_text("\n\n".join(part.read_text() for part in parts))
    return str(path)


def run_example(address, document):
    """Returns the last line of the example as an object; its other output goes to the report."""
    done = subprocess.run(
        [sys.executable, EXAMPLES / "smollm2.py", "--mode", "compare", "--address", address,
         "--cli", BIN / "wavekv", "--document", document, "--json"],
        capture_output=True, text=True, timeout=900,
        env={**os.environ, "OPENBLAS_NUM_THREADS": str(os.cpu_count())},
    )  # fmt: skip
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("which", ["gpl-3", "own documents"])
def test_smollm2_through_wavekv_equals_exact_attention(address, own_documents, which):
    result = run_example(address, GPL3 if which == "gpl-3" else own_documents)
    assert result["tokens_prefilled"] >= 6500
    assert result["tokens_scored"] >= 512
    assert result["tokens_decoded"] >= 64
    assert result["next_token_agreement"] >= 0.97
    assert abs(result["perplexity_wavekv"] / result["perplexity_exact"] - 1) <= 0.01
    # The steady zone alone must be clearly worse: it shows that retrieval and estimation work.
    assert result["perplexity_steady_only"] > 1.02 * result["perplexity_exact"]
    assert 1 - result["next_token_agreement_steady_only"] > 3 * (1 - result["next_token_agreement"])
    # The sketched clusters weigh at this length: docs/decisions/011.
    assert 0 < result["kv_bytes_read_ratio"] <= 0.15
    assert 0 < result["hit_ratio"] <= 1
