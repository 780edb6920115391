"""The same with transformers 4.57, whose caches have other signatures than those of 5.x."""

import os
import pathlib
import subprocess
import sys

import pytest

torch = pytest.importorskip("torch")

# Where scripts/common.sh puts it, beside torch.
OLDEST = pathlib.Path(torch.__file__).parents[1] / "transformers-4.57"
HERE = pathlib.Path(__file__).parent
TESTS = [HERE / f"test_transformers_{what}.py" for what in ("models", "here", "resident")]


@pytest.mark.skipif(not OLDEST.is_dir(), reason="transformers 4.57 is not installed beside torch")
def test_small_models_in_transformers_4_57():
    environment = {**os.environ, "PYTHONPATH": str(OLDEST)}
    version = subprocess.run(
        [sys.executable, "-c", "import transformers; print(transformers.__version__)"],
        capture_output=True, text=True, timeout=300, env=environment, check=True,
    )  # fmt: skip
    assert version.stdout.startswith("4.57.")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--show-capture=stdout", *TESTS],
        capture_output=True, text=True, timeout=1200, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
