#!/usr/bin/env bash
# Checks style and types, then runs the tests, on the real model and data that it fetches
# first. Arguments go to pytest: scripts/test.sh tests/engine -k preempt
# "scripts/test.sh quick" leaves out whole jobs, compiled kernels and all else that takes long:
# for use while working. Before a commit to main run the whole suite.
# A worker for each core runs test files, the longest first (tests/conftest.py has the order);
# -n 0 runs them one after the other in this process.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"

if [ "${1:-}" = quick ]; then
    shift
    set -- --quick "$@"
fi

step() {
    echo "== $*"
    "$@"
}

# Checking types keeps a core busy for a minute; what comes before the tests goes on beside it.
echo "== mypy"
mypy &
types=$!
trap 'kill "$types" 2>/dev/null' EXIT
step python scripts/fetch_model.py
step python scripts/prepare_data.py
step ruff check .
step ruff format --check .
wait "$types"
trap - EXIT
step python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder "$@"
