#!/usr/bin/env bash
# Builds and runs one benchmark: scripts/bench.sh WORKLOAD [--json] [options of the workload].
# With --json the last line is one JSON object. Without a workload: lists them.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

workloads() {
  local file
  for file in "$ROOT"/bench/bench_*.cc; do
    file="${file##*/bench_}"
    printf '  %s\n' "${file%.cc}"
  done
}

case "${1:-}" in
  '' | -h | --help) sed -n '2,3s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; workloads; exit 0 ;;
esac
workload="$1"
[ -f "$ROOT/bench/bench_$workload.cc" ] ||
  die "expected a workload, found '$workload'; there are:"$'\n'"$(workloads)"
shift

say "building"
(cd "$ROOT" && cmake --preset release -DWAVEKV_BENCH=ON -DWAVEKV_TESTS=ON >/dev/null)
build release --target "bench_$workload" >&2
# Of the environment's settings for OpenBLAS some name another machine: its own choice is best.
WAVEKV_COMMIT="$(git -C "$ROOT" describe --always --dirty --abbrev=12 2>/dev/null || echo unknown)" \
  exec env -u OPENBLAS_CORETYPE -u OPENBLAS_L2_SIZE "$ROOT/build/release/bin/bench_$workload" "$@"
