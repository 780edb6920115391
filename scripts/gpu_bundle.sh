#!/usr/bin/env bash
# Builds what runs on a GPU machine and packs it with the shared libraries it needs, so that it runs
# where Debian's are not installed. Four bundles, each small enough to carry:
#   kernels   tests and benchmarks of the CUDA kernels
#   buffer    the daemons, and the tests of the wave buffer that take a real GPU
#   resident  the daemons, the mock decoder, and the tests of the SDK's kernels at work with them
#   python    the daemons, and the Python package (PYTHONPATH=FOLDER) for the machine's own Python,
#             numpy and torch; PYTHON_HEADERS, the folder of a Python.h, says which Python that is
#             where it is not the one here
# All need the CUDA Toolkit.
# Usage: scripts/gpu_bundle.sh [kernels|buffer|resident|python] [FOLDER]   (default: kernels,
# build/gpu-bundle)
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

PACKAGE=()
OPTIONS=()
# What must match the machine's loader and driver.
NOT_PACKED='ld-linux|libc|libm|libdl|librt|libpthread|libcuda'
case "${1:-kernels}" in
  kernels)
    TARGETS=(gpu_step_test gpu_step_limits_test gpu_kmeans_test bench_gpu_attend bench_gpu_build
      bench_gpu_decode bench_gpu_stage)
    ;;
  buffer)
    TARGETS=(wavekvd wavebufferd mock_decoder wave_buffer_peer driver_test cuda_buffer_test
      buffer_stager_test staged_attention_test deaths_test needles_test)
    ;;
  resident)
    TARGETS=(wavekvd wavebufferd mock_decoder decode_peer region_view_test resident_batch_test
      resident_device_test resident_needles_test random_deaths_test)
    ;;
  python)
    python_environment
    TARGETS=(wavekvd wavebufferd)
    PACKAGE=(wavekv_python)
    OPTIONS=(-DWAVEKV_PYTHON=ON "-DPython_EXECUTABLE=$VENV/bin/python"
      "-Dpybind11_DIR=$("$VENV/bin/python" -m pybind11 --cmakedir)"
      "-DWAVEKV_PYTHON_HEADERS=${PYTHON_HEADERS:-}")
    # Of these a process has one: what Python and torch were built with.
    NOT_PACKED="$NOT_PACKED|libstdc\\+\\+|libgcc_s"
    ;;
  *) die "expected kernels, buffer, resident or python, found '$1'" ;;
esac
BYTES_MAX=$((45 * 1000 * 1000))
folder="${2:-$ROOT/build/gpu-bundle}"

say "building ${TARGETS[*]}"
# Each program, and what it loads, looks for libraries beside the program (an RPATH: a RUNPATH does
# not reach the libraries' own needs); nothing else on the machine is affected. Kernels are packed
# tightly: every program has its own.
(cd "$ROOT" && cmake --preset release -DWAVEKV_CUDA=ON -DWAVEKV_BENCH=ON \
  -DCMAKE_CUDA_FLAGS=--compress-mode=size \
  -DCMAKE_BUILD_RPATH='$ORIGIN/../lib' -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags \
  -DCMAKE_MODULE_LINKER_FLAGS=-Wl,--disable-new-dtags "${OPTIONS[@]}" >/dev/null)
cmake --build "$ROOT/build/release" -j"$JOBS" --target "${TARGETS[@]}" "${PACKAGE[@]}"

rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/lib"
for target in "${TARGETS[@]}"; do
  for place in bin tests; do
    if [ -f "$ROOT/build/release/$place/$target" ]; then
      install -s "$ROOT/build/release/$place/$target" "$folder/bin/"
    fi
  done
  [ -x "$folder/bin/$target" ] || die "$target was not built"
  readelf -d "$folder/bin/$target" | grep -q '(RPATH).*ORIGIN' || die "$target has no RPATH"
done
if [ "${#PACKAGE[@]}" -gt 0 ]; then
  cp -r "$ROOT/client/python/src/wavekv" "$folder/"
  find "$folder/wavekv" -name __pycache__ -prune -exec rm -r {} +
  for module in core gpu; do
    install -s "$ROOT/build/release/client/python/_$module".*.so "$folder/wavekv/"
  done
fi
find "$folder" -type f -executable -exec ldd {} + |
  awk '/=> \// {print $3}' | sort -u | grep -Ev "/($NOT_PACKED)[.-]" |
  while read -r library; do install -m 644 "$library" "$folder/lib/"; done
cp "$ROOT/bench/gpu/full_attention.py" "$ROOT/scripts/gpu_check.sh" "$folder/"
git -C "$ROOT" rev-parse HEAD >"$folder/commit"

bytes="$(du -sb "$folder" | cut -f1)"
[ "$bytes" -le "$BYTES_MAX" ] || die "the bundle has $bytes bytes; allowed: $BYTES_MAX"
say "$folder: $bytes bytes"
