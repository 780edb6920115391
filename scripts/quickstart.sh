#!/usr/bin/env bash
# A real language model decodes over a real document with its KV cache in WaveKV: installs what is
# missing, builds, starts the daemons, runs, compares with exact attention, stops what it started.
#
#   ./scripts/quickstart.sh [--document FILE] [--json]
#
# --document FILE   the text to read (default: /usr/share/common-licenses/GPL-3)
# --json            the last line of the output is one JSON object
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

document=/usr/share/common-licenses/GPL-3
example_args=()
while [ $# -gt 0 ]; do
  case "$1" in
    --document) [ $# -ge 2 ] || die "--document needs a file"; document="$2"; shift 2 ;;
    --json) example_args+=(--json); shift ;;
    -h | --help) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) die "unknown argument $1 (see --help)" ;;
  esac
done
[ -r "$document" ] || die "cannot read the document $document"
document="$(realpath "$document")"

install_packages "${BUILD_PACKAGES[@]}"
say "building"
build dev --target wavekvd wavebufferd wavekv >&2
python_environment

run_dir="$(mktemp -d "${TMPDIR:-/tmp}/wavekv-quickstart.XXXXXX")"
pids=()
stop() {
  local pid
  for pid in "${pids[@]}"; do kill -TERM "$pid" 2>/dev/null || true; done
  for pid in "${pids[@]}"; do wait "$pid" 2>/dev/null || true; done
  rm -rf "$run_dir"
}
trap stop EXIT

# start NAME FLAG...: starts a daemon in the background and waits until it says that it is ready.
start() {
  local name="$1" log="$run_dir/$1.log" waited=0
  "$ROOT/build/dev/bin/$@" 2>"$log" &
  pids+=("$!")
  until grep -q 'event=ready' "$log"; do
    kill -0 "$!" 2>/dev/null || { cat "$log" >&2; die "$name ended while starting"; }
    [ "$waited" -lt 300 ] || { cat "$log" >&2; die "$name was not ready after 30 seconds"; }
    waited=$((waited + 1))
    sleep 0.1
  done
}

say "starting wavebufferd and wavekvd"
start wavebufferd --backend=host --listen="unix:$run_dir/wavebuffer.sock" --bytes_max=512MiB
start wavekvd --listen="unix:$run_dir/wavekvd.sock" --pool_bytes=2GiB \
  --wave_buffer="unix:$run_dir/wavebuffer.sock" --wave_buffer_bytes=384MiB

"$VENV/bin/python" "$ROOT/client/python/examples/smollm2.py" --mode compare \
  --address "unix:$run_dir/wavekvd.sock" --cli "$ROOT/build/dev/bin/wavekv" \
  --document "$document" "${example_args[@]}"
