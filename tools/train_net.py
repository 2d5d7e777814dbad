#!/usr/bin/env python
"""Train or evaluate a detector with a LambdaResNet backbone; --help shows how."""

from __future__ import annotations

import sys

from lambda_det.detection.command_line import parser, run
from lambda_det.errors import exit_status


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return exit_status(lambda: run(args), "stopped; --resume continues from the last checkpoint")


if __name__ == "__main__":
    sys.exit(main())
