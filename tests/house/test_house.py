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


def test_every_row_of_faults_names_tests_that_there_are():
    sources = "\n".join(path.read_text() for path in tracked("tests/**.cc", "tests/**.py"))
    page = (ROOT / "docs/faults.md").read_text()
    rows = re.findall(r"^\| (\d+) \|.*\| (.*) \|$", page, re.MULTILINE)
    numbers = [int(number) for number, _ in rows]
    assert numbers == list(range(1, len(rows) + 1))
    for number, tests in rows:
        names = re.findall(r"`([\w.]+)`", tests)
        assert names or tests.startswith("none yet: "), f"row {number} names no test"
        for name in names:
            suite, _, case = name.partition(".")
            found = rf"TEST(_F|_P)?\({suite},\s+{case}\)" if case else rf"def {name}\("
            assert re.search(found, sources), f"row {number}: there is no test {name}"
    for number in re.findall(r"FAULTS (?:rows? )?(\d+)|\b[Rr]ow (\d+)(?= of the list| *:|,)", sources):
        assert int(number[0] or number[1]) in numbers, f"a test names row {number}, which there is not"


def test_flags_and_metrics_are_documented():
    operations = (ROOT / "docs/operations.md").read_text()
    for path in tracked("*.cc"):
        if path.is_relative_to(ROOT / "tests") or path.is_relative_to(ROOT / "bench"):
            continue
        flags = re.findall(r"ABSL_FLAG\([^,]+,\s*(\w+)", path.read_text())
        flags += re.findall(r'add_(?:flag|option)\("--([\w-]+)"', path.read_text())
        for flag in flags:
            assert f"--{flag}" in operations, f"flag --{flag} of {path} is not in docs/operations.md"
        for variable in re.findall(r'getenv\("(\w+)"\)', path.read_text()):
            assert f"`{variable}`" in operations, f"{variable}, read by {path}, is not documented"
        metrics = re.findall(r'"(wavekv_\w+)"', path.read_text())
        for metric in metrics if path.is_relative_to(ROOT / "daemon") else ():
            assert metric in operations, f"metric {metric} of {path} is not in docs/operations.md"
