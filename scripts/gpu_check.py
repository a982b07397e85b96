"""Check and measure the whole engine on a GPU with one command, in under 8 minutes.

    python scripts/gpu_check.py --json gpu_check.json     # everything, a table last
    python scripts/gpu_check.py --only rates              # one part
    python scripts/gpu_check.py --dry-run                 # every part's code on a CPU, tiny shapes

Needs torch, triton, transformers and numpy, this checkout and a GPU; no network. Each part runs
in a process of its own, so that a fault of one (an illegal address ends a CUDA context) takes
nothing else with it. Exits 1 if a check failed, 2 if it could not begin. What each part does and
what its figures are held against is written in docs/gpu.md.
"""

import os
import sys
from pathlib import Path

# The checkout need not be installed.
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
# What asks at import whether there is a GPU must not touch it: the parts' processes could not.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
# Libraries that would look for something on the network fail at once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
if "--dry-run" in sys.argv:
    # Triton reads it when it is imported, which torch and transformers do.
    os.environ["TRITON_INTERPRET"] = "1"

from gpu_check_parts.command import main

if __name__ == "__main__":
    sys.exit(main())
