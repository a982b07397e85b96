"""``python -m batchgen``."""

import signal
import sys
from types import FrameType

from batchgen.cli.app import main
from batchgen.cli.streams import open_standard_descriptors


def _interrupt(number: int, frame: FrameType | None) -> None:
    """Treat SIGTERM like Ctrl-C until the job sets its own handlers."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    open_standard_descriptors()
    signal.signal(signal.SIGTERM, _interrupt)
    # A question, which the job answers once it runs; by default it would end the process.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    sys.exit(main())
