"""``python -m lambda_det``: the command ``lambda-det``."""

import sys

from lambda_det.cli import main

if __name__ == "__main__":
    sys.exit(main())
