"""One run at a time on object storage, by a lease that its owner renews.

pyarrow has no write that fails where an object is there already, so a claim is written,
given time to be overwritten by another's, and read again. A claim counts only where less than
three quarters of that time lay between the look at a free directory and the written claim:
then of two runs that looked at the same time both see the later claim, and one goes on. What
that does not exclude, a write that the network delivers long after its sender gave up and a
run that slept past its lease, is found out at the next look, which comes before an object is
written or deleted. What such a run writes before that look counts for nobody (see ``ledger``).
"""

import json
import logging
import os
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

from batchgen.data import failpoints
from batchgen.data.stores.bucket import Bucket, Stamp
from batchgen.data.stores.faults import StoreError
from batchgen.data.stores.lock import Owner
from batchgen.errors import UsageError

logger = logging.getLogger(__name__)

# A lease that was not renewed for so long is taken over.
EXPIRES_S = 30.0
BEAT_S = 5.0
# How long a claim stands before it counts.
SETTLE_S = 2.0
_ATTEMPTS = 20


@dataclass(frozen=True, slots=True)
class Claim:
    """What the lease's object says.

    Attributes:
        owner: who wrote it, for people.
        machine: the kernel and process namespace it runs in; empty where that is unknown.
        token: the run.
        beat: how often it was renewed.
    """

    owner: Owner
    machine: str
    token: str
    beat: int

    @classmethod
    def read(cls, bucket: Bucket, key: str) -> Self | None:
        """Read a lease; None where there is none, or none that can be read.

        Raises:
            StoreError: the storage does not answer.
        """
        return cls.read_stamped(bucket, key)[0]

    @classmethod
    def read_stamped(cls, bucket: Bucket, key: str) -> tuple[Self | None, Stamp | None]:
        """Read a lease and its object's stamp.

        Raises:
            StoreError: the storage does not answer.
        """
        try:
            text, stamp = bucket.read_stamped(key)
        except FileNotFoundError:
            return None, None
        try:
            content = json.loads(text)
            owner, beat = Owner(**content["owner"]), int(content["beat"])
            return cls(owner, str(content["machine"]), str(content["token"]), beat), stamp
        except (ValueError, KeyError, TypeError):
            return None, stamp

    def to_json(self) -> bytes:
        """Return what ``read`` reads."""
        return json.dumps(asdict(self)).encode()

    def is_live(self, bucket: Bucket, key: str) -> bool:
        """Whether its run is at work: by its process where that is here, else by its renewals.

        Clocks of machines are not compared: a lease is watched until it is renewed, or until it
        should have been long ago.
        """
        if self.machine and self.machine == _this_machine() and not _is_running(self.owner.pid):
            return False
        until = time.monotonic() + EXPIRES_S
        while time.monotonic() < until:
            time.sleep(BEAT_S / 10)
            now = self.read(bucket, key)
            if now is None:
                return False
            if (now.token, now.beat) != (self.token, self.beat):
                return True
        return False


class LeaseLostError(StoreError):
    """Another run has taken the output directory over."""


class Lease:
    """The lease of one output directory.

    Args:
        bucket: where it lies.
        key: of its object.
        place: names the directory for messages.
        on_held: called when the lease is this run's.
    """

    def __init__(self, bucket: Bucket, key: str, place: str, on_held: Callable[[], None]) -> None:
        self._bucket = bucket
        self._key = key
        self._place = place
        self._on_held = on_held
        self._claim = Claim(Owner.this_process(), _this_machine(), uuid.uuid4().hex, 0)
        self._stamp: Stamp | None = None
        # Held while the object and what is known of it change.
        self._mutex = threading.Lock()
        self._released = threading.Event()
        self._thread: threading.Thread | None = None

    def acquire(self) -> None:
        """Take the lease and keep renewing it.

        Raises:
            UsageError: another live run has it; the message names that run.
            StoreError: the storage does not answer.
        """
        failpoints.reached("lock.begin")
        if not any(self._try() for _ in range(_ATTEMPTS)):
            raise StoreError(
                f"{self._place} cannot be leased: the storage takes more than {_claim_s()} s for a "
                "small object, or other runs keep claiming it; try again later"
            )
        self._on_held()
        self._thread = threading.Thread(target=self._keep, name="batchgen-lease", daemon=True)
        self._thread.start()

    def confirm(self) -> None:
        """Make sure that the lease is still this run's.

        Raises:
            LeaseLostError: another run has taken it over.
            StoreError: the storage does not answer.
        """
        with self._mutex:
            if self._is_unchanged():
                return
            found, stamp = Claim.read_stamped(self._bucket, self._key)
            if found is None or found.token != self._claim.token:
                who = "another run" if found is None else found.owner
                raise LeaseLostError(
                    f"{self._place} was taken over by {who}, since this run gave no sign of life "
                    f"for {EXPIRES_S:.0f} s; it stops here"
                )
            self._stamp = stamp

    def release(self) -> None:
        """Let go of the lease; one that was taken over is left alone."""
        if self._thread is None:
            return
        self._released.set()
        self._thread.join()
        self._thread = None
        try:
            found = Claim.read(self._bucket, self._key)
            if found is not None and found.token == self._claim.token:
                self._bucket.delete(self._key)
        except OSError as error:
            logger.warning("%s; the next run waits until the lease expires", error)

    def _try(self) -> bool:
        """Write a claim and see whether it stands."""
        found = Claim.read(self._bucket, self._key)
        is_other = found is not None and found.token != self._claim.token
        if found is not None and is_other and found.is_live(self._bucket, self._key):
            raise UsageError(
                f"output.dir={self._place} is in use by {found.owner}; wait for it, stop it, or "
                "choose another output.dir"
            )
        looked = time.monotonic()
        if Claim.read(self._bucket, self._key) != found:
            return False
        self._renew()
        if time.monotonic() - looked > _claim_s():
            return False
        time.sleep(SETTLE_S)
        now, self._stamp = Claim.read_stamped(self._bucket, self._key)
        if now is None:
            with suppress(FileNotFoundError):
                self._bucket.check_stored(self._key, self._claim.to_json())
        return now is not None and now.token == self._claim.token

    def _renew(self) -> None:
        with self._mutex:
            self._claim = replace(self._claim, beat=self._claim.beat + 1)
            self._stamp = None
            self._bucket.write(self._key, self._claim.to_json())

    def _is_unchanged(self) -> bool:
        """Whether the object is the one that was last read as this run's; one small request."""
        if self._stamp is None or not self._stamp[1]:
            return False
        with suppress(FileNotFoundError):
            return self._bucket.stamp(self._key) == self._stamp
        return False

    def _keep(self) -> None:
        while not self._released.wait(BEAT_S):
            try:
                self.confirm()
                self._renew()
            except LeaseLostError as error:
                # Whoever writes next finds it out as well, and ends the run.
                logger.warning("%s", error)
                return
            except StoreError as error:
                logger.warning("the lease was not renewed: %s", error)


def _claim_s() -> float:
    """Seconds that a claim may take to count; the rest of its time is for those of others."""
    return 0.75 * SETTLE_S


def _this_machine() -> str:
    """Name the running kernel and the namespace in which process ids mean something."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot}-{Path('/proc/self/ns/pid').stat().st_ino}"
    return ""


def _is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
