#!/usr/bin/env bash
# Checks style and types, then runs the tests, on the real model and data that it fetches
# first. Arguments go to pytest: scripts/test.sh tests/engine -k preempt
# A worker for each core runs test files, the longest first (tests/conftest.py has the order);
# -n 0 runs them one after the other in this process.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"

step() {
    echo "== $*"
    "$@"
}

step python scripts/fetch_model.py
step python scripts/prepare_data.py
step ruff check .
step ruff format --check .
step mypy
step python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder "$@"
