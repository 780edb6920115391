#!/usr/bin/env bash
# Builds what runs on a GPU machine (daemons, tests of the wave buffer and of the CUDA kernels,
# benchmarks) and packs it with the shared libraries it needs, so that it runs where Debian's are not installed.
# Usage: scripts/gpu_bundle.sh [FOLDER]   (default: build/gpu-bundle). Needs the CUDA Toolkit.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

TARGETS=(gpu_step_test gpu_step_limits_test gpu_kmeans_test bench_gpu_attend bench_gpu_build
  wavekvd wavebufferd mock_decoder wave_buffer_peer driver_test cuda_buffer_test
  buffer_stager_test staged_attention_test deaths_test needles_test)
BYTES_MAX=$((45 * 1000 * 1000))
folder="${1:-$ROOT/build/gpu-bundle}"

say "building ${TARGETS[*]}"
# Each program, and what it loads, looks for libraries beside the program (an RPATH: a RUNPATH does
# not reach the libraries' own needs); nothing else on the machine is affected.
(cd "$ROOT" && cmake --preset release -DWAVEKV_CUDA=ON -DWAVEKV_BENCH=ON \
  -DCMAKE_BUILD_RPATH='$ORIGIN/../lib' -DCMAKE_EXE_LINKER_FLAGS=-Wl,--disable-new-dtags >/dev/null)
cmake --build "$ROOT/build/release" -j"$JOBS" --target "${TARGETS[@]}"

rm -rf "$folder"
mkdir -p "$folder/bin" "$folder/lib"
for target in "${TARGETS[@]}"; do
  for place in bin tests; do
    if [ -x "$ROOT/build/release/$place/$target" ]; then
      install -s "$ROOT/build/release/$place/$target" "$folder/bin/"
    fi
  done
  [ -x "$folder/bin/$target" ] || die "$target was not built"
  readelf -d "$folder/bin/$target" | grep -q '(RPATH).*ORIGIN' || die "$target has no RPATH"
done
# All libraries but those that must match the machine's loader and driver.
ldd "$folder"/bin/* | awk '/=> \// {print $3}' | sort -u |
  grep -Ev '/(ld-linux|libc|libm|libdl|librt|libpthread|libcuda)[.-]' |
  while read -r library; do install -m 644 "$library" "$folder/lib/"; done
cp "$ROOT/bench/gpu/full_attention.py" "$ROOT/scripts/gpu_check.sh" "$folder/"
git -C "$ROOT" rev-parse HEAD >"$folder/commit"

bytes="$(du -sb "$folder" | cut -f1)"
[ "$bytes" -le "$BYTES_MAX" ] || die "the bundle has $bytes bytes; allowed: $BYTES_MAX"
say "$folder: $bytes bytes"
