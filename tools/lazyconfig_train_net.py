#!/usr/bin/env python
"""Train or evaluate what a LazyConfig (a Python file) describes; --help shows how."""

from __future__ import annotations

import sys

from lambda_det.detection.command_line import lazy_parser
from lambda_det.training import command_line


def main(argv: list[str] | None = None) -> int:
    return command_line.main(lazy_parser(), argv)


if __name__ == "__main__":
    sys.exit(main())
