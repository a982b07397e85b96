"""``python -m batchgen``."""

from batchgen import early_signals

if __name__ == "__main__":
    early_signals.install()

import sys

from batchgen.cli.app import main
from batchgen.report.streams import open_standard_descriptors

if __name__ == "__main__":
    open_standard_descriptors()
    sys.exit(main())
