#!/usr/bin/env python
"""Train or evaluate a detector with a LambdaResNet backbone; --help shows how."""

from __future__ import annotations

import sys

from lambda_det.cli import detector_parser
from lambda_det.training import command_line


def main(argv: list[str] | None = None) -> int:
    return command_line.main(detector_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
