"""How many threads the CPU's kernels run on.

torch counts the machine's cores. In a container that may use two of sixty-four, sixty-four
threads then wait for each other in every small operator; so the process's own share counts.
"""

import math
import os
from pathlib import Path

import torch

_CGROUP_V2 = Path("/sys/fs/cgroup/cpu.max")
_CGROUP_V1 = Path("/sys/fs/cgroup/cpu")


def use_threads(asked: int | None) -> int:
    """Set torch's threads for this process.

    What the environment says (``OMP_NUM_THREADS``) stays where nothing is asked for.

    Args:
        asked: how many; None for the cores that the process may use.

    Returns:
        How many there are now.
    """
    if asked is not None:
        torch.set_num_threads(asked)
    elif not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(min(torch.get_num_threads(), usable_cores()))
    return torch.get_num_threads()


def usable_cores() -> int:
    """Count the cores that the process may run on, by its affinity and its container's quota."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    quota = _quota()
    return cores if quota is None else max(1, min(cores, math.ceil(quota)))


def _quota() -> float | None:
    """Read the cores' worth of time that a control group grants; None if it sets no limit."""
    try:
        if _CGROUP_V2.exists():
            quota, period = _CGROUP_V2.read_text(encoding="ascii").split()
        else:
            quota = (_CGROUP_V1 / "cpu.cfs_quota_us").read_text(encoding="ascii")
            period = (_CGROUP_V1 / "cpu.cfs_period_us").read_text(encoding="ascii")
        return int(quota) / int(period) if quota.strip() != "max" and int(quota) > 0 else None
    except (OSError, ValueError):
        return None
