"""Runs clang's thread-safety analysis over a configured build's own sources, without generating code.

Tests are left out: what they lock lies in the rooms.

Usage: thread_safety.py BUILD_DIR JOBS
Reads BUILD_DIR/compile_commands.json; exits 1 when a file has a diagnostic.
"""

import concurrent.futures
import json
import pathlib
import shlex
import subprocess
import sys


def check(entry: dict) -> str:
    """Returns clang's diagnostics for one compile command; empty when it is clean."""
    words = shlex.split(entry["command"])
    while pathlib.Path(words[0]).name == "ccache":
        words.pop(0)
    out = words.index("-o")
    command = words[:out] + words[out + 2 :] + ["-fsyntax-only"]
    done = subprocess.run(command, cwd=entry["directory"], capture_output=True, text=True)
    return done.stderr if done.returncode else ""


def main() -> int:
    build, jobs = pathlib.Path(sys.argv[1]), int(sys.argv[2])
    root = pathlib.Path(__file__).resolve().parents[1]
    entries = [
        entry
        for entry in json.loads((build / "compile_commands.json").read_text())
        if not pathlib.Path(entry["file"]).is_relative_to(build.resolve())
        and not pathlib.Path(entry["file"]).is_relative_to(root / "tests")
    ]
    with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
        found = [text for text in pool.map(check, entries) if text]
    print("\n".join(found))
    print(f"thread safety: {len(entries)} files, {len(found)} with diagnostics")
    return 1 if found or not entries else 0


if __name__ == "__main__":
    sys.exit(main())
