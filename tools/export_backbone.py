#!/usr/bin/env python
"""Make a verified backbone file, as ``lambda-det backbone`` does; --help shows how."""

import sys

from lambda_det.export.backbone_command import main

if __name__ == "__main__":
    sys.exit(main())
