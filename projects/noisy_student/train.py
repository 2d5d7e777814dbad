#!/usr/bin/env python
"""Train a classifier on labelled images and on a teacher's labels for others; --help shows how."""

from __future__ import annotations

import sys

from lambda_det.classification import parser, run
from lambda_det.errors import exit_status
from noisy_student.task import StudentTask


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    return exit_status(
        lambda: run(args, StudentTask), "stopped; --resume continues from the last checkpoint"
    )


if __name__ == "__main__":
    sys.exit(main())
