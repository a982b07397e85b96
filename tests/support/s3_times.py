"""Shorter waits on object storage, for runs by the dozen; as many attempts as ever."""

from batchgen.data.stores import bucket, faults, lease


def quick() -> None:
    """Wait less between attempts, for others' claims, and for signs of life."""
    bucket.CLIENT_ATTEMPTS = 1
    faults.PAUSES_S = (0.02,) * 14
    lease.SETTLE_S = 0.2
    lease.BEAT_S = 1.0
