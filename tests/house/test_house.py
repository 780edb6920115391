"""Rules about the tree itself: every test is built, nothing grows without bound."""

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
LINES_MAX = 600


def tracked(*patterns: str) -> list[pathlib.Path]:
    out = subprocess.run(
        ["git", "ls-files", "-z", "--", *patterns], cwd=ROOT, capture_output=True, check=True
    ).stdout.decode()
    return [ROOT / name for name in out.split("\0") if name]


def test_every_test_file_is_built():
    files = tracked("tests/**/*_test.cc")
    assert files
    for path in files:
        lists = (path.parent / "CMakeLists.txt").read_text()
        assert re.search(rf"\b{path.stem}\b", lists), f"{path} is named by no CMakeLists.txt"


def test_every_source_is_built():
    for path in tracked("storage/**.cc", "index/**.cc", "daemon/**.cc", "gpu/**.cc", "client/**.cc"):
        folder = path.parent
        while folder != ROOT:
            lists = folder / "CMakeLists.txt"
            if lists.exists() and str(path.relative_to(folder)) in lists.read_text():
                break
            folder = folder.parent
        assert folder != ROOT, f"{path} is named by no CMakeLists.txt"


def test_no_file_grows_past_what_one_can_hold():
    for path in tracked("*.cc", "*.h", "*.py", "*.cu", "*.cuh"):
        lines = len(path.read_text().splitlines())
        assert lines <= LINES_MAX, f"{path} has {lines} lines: look for the noun that wants out"


def test_headers_are_guarded():
    for path in tracked("*.h"):
        # Highway includes such a file once for each instruction set: its guard toggles.
        guard = "HWY_TARGET_TOGGLE" if path.name.endswith("-inl.h") else "#pragma once"
        assert guard in path.read_text(), path


def test_readme_names_the_two_commands():
    readme = (ROOT / "README.md").read_text()
    for command in ("./scripts/quickstart.sh", "./scripts/test.sh"):
        assert command in readme


def test_flags_and_metrics_are_documented():
    operations = (ROOT / "docs/operations.md").read_text()
    for path in tracked("daemon/**.cc", "gpu/**.cc"):
        for flag in re.findall(r"ABSL_FLAG\([^,]+,\s*(\w+)", path.read_text()):
            assert f"--{flag}" in operations, f"flag --{flag} of {path} is not in docs/operations.md"
        for metric in re.findall(r'"(wavekv_\w+)"', path.read_text()):
            assert metric in operations, f"metric {metric} of {path} is not in docs/operations.md"
