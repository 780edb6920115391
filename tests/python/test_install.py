"""What an engine's developer does first: install, find_package, and the program of the README."""

import os
import pathlib
import re
import shutil
import subprocess
import tarfile

import pytest
from daemons import BIN

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILD = BIN.parent

# The README's program with what an engine would have around it, for a model of its shape.
PROGRAM = """
#include <cstdint>
#include <cstdio>
#include <numeric>
#include <vector>
%(includes)s

absl::Status Run() {
  const int64_t n = 64;
  std::vector<uint32_t> layers(32);
  std::iota(layers.begin(), layers.end(), 0);
  const std::vector<uint16_t> rows(32 * n * 8 * 128, 0x3f80);  // 1.0 in bf16
  const auto *keys = rows.data(), *values = keys, *k = keys, *v = keys, *q = keys;
  const uint32_t layer = 31;
%(body)s
  if (!step.ok()) return step.status();
  if (step->token_count != 65) return absl::InternalError("a token is missing");
  std::printf("out %%.2f\\n", step->out[32 * 128 - 1]);
  return absl::OkStatus();
}

int main() {
  const absl::Status status = Run();
  if (!status.ok()) std::fprintf(stderr, "%%s\\n", status.ToString().c_str());
  return status.ok() ? 0 : 1;
}
"""

PROJECT = """
cmake_minimum_required(VERSION 3.25)
project(engine LANGUAGES CXX)
%s
add_executable(engine main.cc)
target_link_libraries(engine PRIVATE wavekv::client)
"""


def run(*command, **options):
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, timeout=600, **options
    )
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def write_engine(folder, address, how):
    """Writes a project with the README's program, which finds WaveKV by the command `how`."""
    text = (ROOT / "README.md").read_text()
    snippet = re.search(r"```cpp\n(.*?)```", text, re.DOTALL).group(1)
    # The socket of the test, and memory that its daemon has.
    for old, new in (("unix:/run/wavekv/wavekvd.sock", address), ("131072", "128")):
        assert snippet.count(old) == 1, f"the README's program has no single {old}"
        snippet = snippet.replace(old, new)
    includes, body = snippet.split("\n\n", 1)
    folder.mkdir()
    (folder / "main.cc").write_text(PROGRAM % {"includes": includes, "body": body})
    (folder / "CMakeLists.txt").write_text(PROJECT % how)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    folder = tmp_path_factory.mktemp("prefix")
    run("cmake", "--install", BUILD, "--prefix", folder, "--strip")
    yield folder
    shutil.rmtree(folder)


def test_the_installed_sdk_builds_the_program_of_the_readme(prefix, tmp_path, private_daemon):
    address, _ = private_daemon
    write_engine(tmp_path / "engine", address, "find_package(wavekv 0.1 REQUIRED)")
    run("cmake", "-S", tmp_path / "engine", "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path / "build")
    # All keys are equal and all values are 1, so attention answers 1.
    assert run(tmp_path / "build" / "engine") == "out 1.00\n"


GPU_PROGRAM = """
#include <cstdio>

#include "client/gpu/resident_batch.h"

int main() {
  // Refused before anything is asked of a GPU.
  const wavekv::client::ResidentModel model = {.layer_count = 0};
  const absl::Status status = wavekv::client::ResidentBatch::Create(model).status();
  std::printf("%s", status.ToString().c_str());
}
"""


def test_the_installed_sdk_has_its_gpu_part(prefix, tmp_path):
    if not list(prefix.rglob("wavekvGpuTargets.cmake")):
        pytest.skip("built without the CUDA Toolkit")
    project = PROJECT % "find_package(wavekv 0.1 REQUIRED)\n"
    (tmp_path / "CMakeLists.txt").write_text(project.replace("wavekv::client", "wavekv::client_gpu"))
    (tmp_path / "main.cc").write_text(GPU_PROGRAM)
    run("cmake", "-S", tmp_path, "-B", tmp_path / "build", f"-DCMAKE_PREFIX_PATH={prefix}")
    run("cmake", "--build", tmp_path / "build")
    said = run(tmp_path / "build" / "engine")
    assert said.startswith("INVALID_ARGUMENT: ResidentModel::layer_count is 0")


def test_what_is_installed_is_complete_and_no_more(prefix):
    found = {str(path.relative_to(prefix)) for path in prefix.rglob("*") if path.is_file()}
    for name in (
        "bin/wavekvd", "bin/wavebufferd", "bin/wavekv", "include/wavekv/client/session.h",
        "share/wavekv/proto/wavekv/v1/wavekv.proto", "share/doc/wavekv/LICENSE",
        "share/doc/wavekv/README.md", "share/doc/wavekv/docs/operations.md",
    ):  # fmt: skip
        assert name in found, f"{name} is not installed; there are {sorted(found)}"
    programs = {name for name in found if name.startswith("bin/")}
    assert programs == {"bin/wavekvd", "bin/wavebufferd", "bin/wavekv"}
    assert "0.1.0" in run(prefix / "bin" / "wavekvd", "--version")
    # Nothing that is installed names the place it was built in.
    for name in found:
        if name.endswith(".cmake"):
            assert str(ROOT) not in (prefix / name).read_text(), name


def test_the_tree_can_be_a_subdirectory(tmp_path):
    write_engine(tmp_path / "engine", "unix:/nowhere", f'add_subdirectory("{ROOT}" wavekv EXCLUDE_FROM_ALL)')
    run("cmake", "-G", "Ninja", "-S", tmp_path / "engine", "-B", tmp_path / "build",
        "-DWAVEKV_DAEMON=OFF", "-DWAVEKV_CLI=OFF")  # fmt: skip
    # That it compiles shows that headers are found; linking would build all of the SDK again.
    run("cmake", "--build", tmp_path / "build", "--target", "CMakeFiles/engine.dir/main.cc.o")
    targets = run("cmake", "--build", tmp_path / "build", "--target", "help")
    assert "_test:" not in targets, "another project does not want our tests"


def test_the_archive_unpacks_to_what_is_installed(prefix, tmp_path):
    run("cpack", "-G", "TGZ", "--config", BUILD / "CPackConfig.cmake", "-B", tmp_path,
        env={**os.environ, "CPACK_PACKAGE_DIRECTORY": str(tmp_path)})  # fmt: skip
    (archive,) = tmp_path.glob("wavekv-*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.split("/", 1)[1] for name in files.getnames() if "/" in name}
    installed = {str(path.relative_to(prefix)) for path in prefix.rglob("*") if path.is_file()}
    assert installed <= names
