#!/usr/bin/env python
"""Train or evaluate a detector with a LambdaResNet backbone; --help shows how."""

from __future__ import annotations

import sys

from lambda_det.engine import parser, run
from lambda_det.errors import UserError


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        run(args)
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("stopped; --resume continues from the last checkpoint", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
