#!/usr/bin/env bash
# Installs what is missing, builds, runs every test. Last line: N passed, N failed, N skipped.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/common.sh"

install_packages "${BUILD_PACKAGES[@]}"
say "building"
build dev
python_environment
# Without them the tests of wavekv.transformers are skipped, and counted so.
torch_environment || true

results="$ROOT/build/test-results"
rm -rf "$results"
mkdir -p "$results"
status=0
say "running the C++ tests"
# Integration tests start daemons and check time limits: they run one by one, after the others.
run_tests dev -LE integration --output-junit "$results/unit.xml" || status=1
run_tests dev -j1 -L integration --output-junit "$results/integration.xml" || status=1
say "running the Python tests"
(cd "$ROOT" && WAVEKV_BIN_DIR="$ROOT/build/dev/bin" "$VENV/bin/python" -m pytest -q -rs \
  --junitxml "$results/python.xml" tests/house tests/python) || status=1

"$VENV/bin/python" "$ROOT/scripts/count_tests.py" "$status" "$results"/*.xml
