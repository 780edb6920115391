#!/usr/bin/env bash
# Builds what runs on a GPU machine and packs it with the shared libraries it needs, so that it runs
# where Debian's are not installed. Five bundles, each small enough to carry:
#   kernels   tests and benchmarks of the CUDA kernels
#   buffer    the daemons, and the tests of the wave buffer that take a real GPU
#   suite     the daemons, and the integration suite, which has a wave buffer on the GPU beside it
#   resident  the daemons, the mock decoder, and the tests of the SDK's kernels at work with them
#   python    the daemons, the Python package and gguf: what bench/gpu/transformers_*.py want beside
#             the machine's own numpy, torch and transformers. WAVEKV_BUNDLE_PYTHON: a Python of the
#             version of the machine's, with its headers (python3.12). There, in a copy of this tree:
#               export PYTHONPATH=FOLDER WAVEKV_BIN_DIR=FOLDER/bin
#               python3 bench/gpu/transformers_speed.py --commit "$(cat FOLDER/commit)"
# All need the CUDA Toolkit; python also .venv with pybind11 and gguf, as scripts/test.sh makes it.
# Usage: scripts/gpu_bundle.sh [kernels|buffer|suite|resident|python] [FOLDER]   (default: kernels,
# build/gpu-bundle; for python build/gpu-bundle-python)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

PACKAGE=()
OPTIONS=()
# What must match the machine's loader and driver.
NOT_PACKED='ld-linux|libc|libm|libdl|librt|libpthread|libcuda'
FOLDER="$ROOT/build/gpu-bundle"
case "${1:-kernels}" in
  kernels)
    TARGETS=(gpu_step_test gpu_step_limits_test gpu_kmeans_test key_labeller_test bench_gpu_attend
      bench_gpu_build bench_gpu_decode bench_gpu_stage)
    ;;
  buffer)
    TARGETS=(wavekvd wavebufferd mock_decoder wave_buffer_peer driver_test cuda_buffer_test
      buffer_stager_test staged_attention_test deaths_test needles_test)
    ;;
  suite)
    TARGETS=(wavekvd wavebufferd wavekv data_path_test faults_answers_test faults_limits_test
      faults_numbers_test fuzz_test labels_path_test record_replay_test)
    ;;
  resident)
    TARGETS=(wavekvd wavebufferd mock_decoder decode_peer region_view_test resident_batch_test
      resident_device_test resident_needles_test random_deaths_test)
    ;;
  python)
    FOLDER="$FOLDER-python"
    PYTHON="${WAVEKV_BUNDLE_PYTHON:-python3.12}"
    PYTHON="$(command -v "$PYTHON")" || die "no $PYTHON: set WAVEKV_BUNDLE_PYTHON"
    PYTHON="$("$PYTHON" -c 'import sys; print(sys.executable)')"
    [ -x "$VENV/bin/python" ] || die "no $VENV: run scripts/test.sh, which makes it"
    TARGETS=(wavekvd wavebufferd)
    PACKAGE=(wavekv_python)
    OPTIONS=(-DWAVEKV_PYTHON=ON "-DPython_EXECUTABLE=$PYTHON"
      "-Dpybind11_DIR=$("$VENV/bin/python" -m pybind11 --cmakedir)")
    # Of these a process has one: what Python and torch were built with.
    NOT_PACKED="$NOT_PACKED|libstdc\\+\\+|libgcc_s"
    ;;
  *) die "expected kernels, buffer, suite, resident or python, found '$1'" ;;
esac
BYTES_MAX=$((45 * 1000 * 1000))
folder="${2:-$FOLDER}"
build="$ROOT/build/gpu-release"  # Of its own: other flags than those of the presets.

say "building ${TARGETS[*]}"
# Each program, and what it loads, looks for libraries beside the program (an RPATH: a RUNPATH does
# not reach the libraries' own needs); nothing else on the machine is affected. Kernels are packed
# tightly: every program has its own.
(cd "$ROOT" && cmake --preset release -B "$build" -DWAVEKV_CUDA=ON -DWAVEKV_BENCH=ON \
  -DCMAKE_CUDA_FLAGS=--compress-mode=size \
  -DCMAKE_BUILD_RPATH='$ORIGIN/../lib' -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags \
  -DCMAKE_MODULE_LINKER_FLAGS=-Wl,--disable-new-dtags "${OPTIONS[@]}" >/dev/null)
cmake --build "$build" -j"$JOBS" --target "${TARGETS[@]}" "${PACKAGE[@]}"

rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/lib"
for target in "${TARGETS[@]}"; do
  for place in bin tests; do
    if [ -f "$build/$place/$target" ]; then
      install -s "$build/$place/$target" "$folder/bin/"
    fi
  done
  [ -x "$folder/bin/$target" ] || die "$target was not built"
  readelf -d "$folder/bin/$target" | grep -q '(RPATH).*ORIGIN' || die "$target has no RPATH"
done
if [ "${#PACKAGE[@]}" -gt 0 ]; then
  cp -r "$ROOT/client/python/src/wavekv" "$folder/"
  # With its metadata, in which transformers looks for it.
  cp -r "$("$VENV/bin/python" -c 'import gguf; print(gguf.__path__[0])')"* "$folder/"
  find "$folder" -name __pycache__ -prune -exec rm -r {} +
  tag="$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_config_var("SOABI"))')"
  for module in _core _gpu; do
    install -s "$build/client/python/$module.$tag.so" "$folder/wavekv/"
    readelf -d "$folder/wavekv/$module.$tag.so" | grep -q '(RPATH).*ORIGIN' ||
      die "$module has no RPATH"
  done
fi
find "$folder" -type f \( -path "$folder/bin/*" -o -name '*.so' \) -exec ldd {} + |
  awk '/=> \// {print $3}' | sort -u | grep -Ev "/($NOT_PACKED)[.-]" |
  while read -r library; do install -m 644 "$library" "$folder/lib/"; done
cp "$ROOT/bench/gpu/full_attention.py" "$ROOT/scripts/gpu_check.sh" "$folder/"
git -C "$ROOT" rev-parse HEAD >"$folder/commit"

bytes="$(du -sb "$folder" | cut -f1)"
[ "$bytes" -le "$BYTES_MAX" ] || die "the bundle has $bytes bytes; allowed: $BYTES_MAX"
say "$folder: $bytes bytes"
