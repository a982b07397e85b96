"""``python -m batchgen``."""

import sys

from batchgen.cli.app import main

if __name__ == "__main__":
    sys.exit(main())
