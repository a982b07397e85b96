"""``python -m batchgen``."""

from batchgen import early_signals

if __name__ == "__main__":
    early_signals.install()

import sys  # noqa: E402

from batchgen.cli.app import main  # noqa: E402
from batchgen.cli.streams import open_standard_descriptors  # noqa: E402

if __name__ == "__main__":
    open_standard_descriptors()
    sys.exit(main())
