#!/usr/bin/env bash
# Runs the GPU tests and benchmarks of a bundle (scripts/gpu_bundle.sh), whichever it holds, and
# writes their results as JSON. Usage, in the bundle's folder: ./gpu_check.sh RESULTS [BATCHxTOKENS ...]
# A python3 with torch gives the time of full attention; without one it is left out. STEPS (50) is
# the number of steps a row is the median of. What takes longer than PART_S (180) seconds has failed.
# PARTS names the only parts to run, with spaces between them. random_deaths_test kills somebody
# ROUNDS (60) times, in at most DEATHS_S (400) seconds.
set -euo pipefail
bundle="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
results="${1:?usage: gpu_check.sh RESULTS [BATCHxTOKENS ...]}"
shift
shapes=("$@")
[ "${#shapes[@]}" -gt 0 ] ||
  shapes=(8x122880 1x122880 1x1048576 16x122880 4x122880 1x32768 4x32768 8x32768 16x32768)
mkdir -p "$results"
status=0

used_mib() { nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits | head -n 1; }

# part NAME COMMAND...: runs it, its output in RESULTS/NAME.log, and says how it ended.
part() {
  local name="$1" outcome="passed" start="$SECONDS"
  shift
  [ -z "${PARTS:-}" ] || [[ " $PARTS " == *" $name "* ]] || return 0
  timeout "${PART_S:-180}" "$@" >"$results/$name.log" 2>&1 || outcome="FAILED ($?)"
  # A test that finds no device is skipped: here that is a failure.
  ! grep -q SKIPPED "$results/$name.log" || outcome="FAILED (skipped)"
  [ "$outcome" = passed ] || status=1
  echo "$name: $outcome, $((SECONDS - start)) s"
  printf '{"part": "%s", "outcome": "%s", "seconds": %d}\n' "$name" "$outcome" \
    "$((SECONDS - start))" >>"$results/parts.jsonl"
}

# The last lines of those parts that ran.
last_lines() {
  local name
  for name in "$@"; do
    [ ! -f "$results/$name.log" ] || tail -n 1 "$results/$name.log"
  done
}

# Tests that start the daemons; of each bundle those that it holds.
check_daemons() {
  # What is left of the GPU's memory when all processes of the tests are gone.
  local used_before
  used_before="$(used_mib)"
  for test in driver_test cuda_buffer_test buffer_stager_test staged_attention_test deaths_test \
    needles_test data_path_test faults_answers_test faults_limits_test faults_numbers_test \
    fuzz_test labels_path_test record_replay_test region_view_test resident_batch_test \
    resident_device_test resident_needles_test; do
    [ -x "$bundle/bin/$test" ] || continue
    part "$test" env WAVEKV_TEST_GPU=1 WAVEKV_TEST_BACKEND=cuda "$bundle/bin/$test"
  done
  if [ -x "$bundle/bin/random_deaths_test" ]; then check_resident; fi
  part memory_comes_back test "$(used_mib)" -le "$used_before"
}

check_resident() {
  part mock_decoder "$bundle/bin/mock_decoder" --backend=cuda --mode=compare --tokens=131072 \
    --needles=32 --json
  last_lines mock_decoder | tee "$results/mock-131072.json"
  PART_S="${DEATHS_S:-400}" part random_deaths_test env WAVEKV_TEST_GPU=1 \
    WAVEKV_TEST_ROUNDS="${ROUNDS:-60}" "$bundle/bin/random_deaths_test"
  if command -v compute-sanitizer >/dev/null; then
    part resident_memcheck compute-sanitizer --tool memcheck --error-exitcode 1 \
      "$bundle/bin/resident_batch_test"
  fi
}

check_kernels() {
  for test in gpu_step_test gpu_step_limits_test gpu_kmeans_test key_labeller_test; do
    part "$test" "$bundle/bin/$test"
  done
  if command -v compute-sanitizer >/dev/null; then
    part memcheck compute-sanitizer --tool memcheck --error-exitcode 1 "$bundle/bin/gpu_step_test" \
      --gtest_filter='*DifferentLengths*:*TableFull*:*FewCached*:*Dim256Group16*:*Dim64Group9*'
    part racecheck compute-sanitizer --tool racecheck --error-exitcode 1 \
      "$bundle/bin/gpu_step_test" --gtest_filter='*OneSegment*:*Dim128Group9*'
  fi

  part full_attention python3 "$bundle/full_attention.py" "$results/full.json" "${shapes[@]}"
  for shape in "${shapes[@]}"; do
    part "attend-$shape" "$bundle/bin/bench_gpu_attend" --batch="${shape%x*}" --tokens="${shape#*x}" \
      --own=0.05,0.2 --steps="${STEPS:-50}" --full="$results/full.json" \
      --out="$results/attend-$shape.json"
    grep -sE '^[0-9]' "$results/attend-$shape.log" || true
  done
  part decode-4x122880 "$bundle/bin/bench_gpu_decode" --full="$results/full.json" \
    --out="$results/decode-4x122880.json"
  part stage-8x122880 "$bundle/bin/bench_gpu_stage" --out="$results/stage-8x122880.json"
  last_lines decode-4x122880 stage-8x122880
  for tokens in 122880 1048576; do
    part "build-$tokens" "$bundle/bin/bench_gpu_build" --tokens="$tokens" \
      --out="$results/build-$tokens.json"
    last_lines "build-$tokens"
  done
}

# What the bundle holds.
if [ -x "$bundle/bin/wavebufferd" ]; then check_daemons; fi
if [ -x "$bundle/bin/gpu_step_test" ]; then check_kernels; fi

# One file of each kind, with where it comes from.
python3 - "$results" "$(cat "$bundle/commit")" <<'PYTHON'
import datetime, glob, json, subprocess, sys

folder, commit = sys.argv[1:]
device = subprocess.run(["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader"],
                        capture_output=True, text=True, check=False).stdout.strip()
for kind in ("attend", "build", "decode", "stage"):
    rows = []
    for path in sorted(glob.glob(f"{folder}/{kind}-*.json")):
        with open(path, encoding="utf-8") as file:
            found = json.load(file)
        rows += found if isinstance(found, list) else [found]
    if not rows:
        continue
    with open(f"{folder}/gpu-{kind}.json", "w", encoding="utf-8") as file:
        json.dump({"commit": commit, "date": datetime.date.today().isoformat(),
                   "command": "scripts/gpu_check.sh", "device": device, "rows": rows}, file, indent=1)
PYTHON
exit "$status"
