#!/usr/bin/env bash
# Builds the daemons and the Python package for the Python of a GPU machine, and packs them with the
# shared libraries they need: what bench/gpu/transformers_*.py want beside torch and transformers.
# There, in a copy of this tree:
#   export PYTHONPATH=FOLDER WAVEKV_BIN_DIR=FOLDER/bin
#   python3 bench/gpu/transformers_speed.py --out speed.json --commit "$(cat FOLDER/commit)"
# WAVEKV_BUNDLE_PYTHON: a Python of that version, with its headers (python3.12). Needs the CUDA
# Toolkit, and .venv with pybind11 and gguf, as scripts/test.sh makes it.
# Usage: scripts/gpu_python_bundle.sh [FOLDER]   (default: build/gpu-python-bundle)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

folder="${1:-$ROOT/build/gpu-python-bundle}"
python="$(command -v "${WAVEKV_BUNDLE_PYTHON:-python3.12}")" || die "no ${WAVEKV_BUNDLE_PYTHON:-python3.12}"
python="$("$python" -c 'import sys; print(sys.executable)')"
BYTES_MAX=$((45 * 1000 * 1000))

# As scripts/gpu_bundle.sh builds, so that the compiler cache serves both. Programs in bin/ and
# modules in wavekv/ look into lib/.
(cd "$ROOT" && cmake --preset release -DWAVEKV_CUDA=ON -DWAVEKV_BENCH=ON -DWAVEKV_PYTHON=ON \
  -DPython_EXECUTABLE="$python" -Dpybind11_DIR="$("$VENV/bin/python" -m pybind11 --cmakedir)" \
  -DCMAKE_CUDA_FLAGS=--compress-mode=size -DCMAKE_BUILD_RPATH='$ORIGIN/../lib' \
  -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags \
  -DCMAKE_MODULE_LINKER_FLAGS=-Wl,--disable-new-dtags >/dev/null)
cmake --build "$ROOT/build/release" -j"$JOBS" --target wavekvd wavebufferd wavekv_python

rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/lib"
install -s "$ROOT"/build/release/bin/{wavekvd,wavebufferd} "$folder/bin/"
cp -r "$ROOT/client/python/src/wavekv" "$folder/"
tag="$("$python" -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))')"
for module in _core _gpu; do
  install -s "$ROOT/build/release/client/python/$module.$tag.so" "$folder/wavekv/"
done
cp -r "$("$VENV/bin/python" -c 'import gguf, pathlib; print(pathlib.Path(gguf.__file__).parent)')"* "$folder/"
find "$folder" -name __pycache__ -prune -exec rm -r {} +
for file in "$folder"/bin/* "$folder"/wavekv/*.so; do
  readelf -d "$file" | grep -q '(RPATH).*ORIGIN' || die "$file has no RPATH"
done
# All libraries but those that must match the machine's loader and driver, and the C++ library, of
# which torch wants the machine's.
ldd "$folder"/bin/* "$folder"/wavekv/*.so | awk '/=> \// {print $3}' | sort -u |
  grep -Ev '/(ld-linux|libc|libm|libdl|librt|libpthread|libcuda|libstdc\+\+|libgcc_s)[.-]|^'"$folder/" |
  while read -r library; do install -m 644 "$library" "$folder/lib/"; done
git -C "$ROOT" rev-parse HEAD >"$folder/commit"

bytes="$(du -sb "$folder" | cut -f1)"
[ "$bytes" -le "$BYTES_MAX" ] || die "the bundle has $bytes bytes; allowed: $BYTES_MAX"
say "$folder: $bytes bytes"
