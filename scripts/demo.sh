#!/usr/bin/env bash
# Fetches a small model and real review sentences, labels them, and shows some of the labels.
# Run it again and it finds everything in place: nothing is computed twice.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/setup_venv.sh"

python scripts/fetch_model.py
python scripts/prepare_data.py
python -m batchgen job=sentiment
echo
python scripts/show_labels.py
