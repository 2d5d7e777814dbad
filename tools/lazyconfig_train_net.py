#!/usr/bin/env python
"""Train or evaluate what a LazyConfig (a Python file) describes; --help shows how."""

from __future__ import annotations

import sys

from lambda_det.detection.command_line import lazy_parser, run
from lambda_det.errors import exit_status


def main(argv: list[str] | None = None) -> int:
    args = lazy_parser().parse_args(argv)
    return exit_status(lambda: run(args), "stopped; --resume continues from the last checkpoint")


if __name__ == "__main__":
    sys.exit(main())
