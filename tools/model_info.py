#!/usr/bin/env python
"""Print the networks: parameters, multiply-adds, and the paper's figures beside them."""

from __future__ import annotations

import argparse
import fnmatch
import sys

# lambda_det and PyTorch are imported in functions, so that --help answers at once

EXAMPLES = """examples:
  tools/model_info.py                        all networks, at the image size of the paper's figures
  tools/model_info.py 'lambda_resnet*'       those whose names match
  tools/model_info.py lambda_resnet152 --image-size 1024 --markdown

columns:
  params, paper      millions of parameters with 1000 classes
  GFLOPs             2 per multiply-add, position lambdas built first, as the paper counts
  GFLOPs qf          the same with the query contracted first, as lambda_det computes them
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["*"], help="names or patterns; all if none")
    parser.add_argument("--image-size", type=int, help="side of the input instead of the paper's")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    return parser.parse_args(argv)


def rows(patterns: list[str], image_size: int | None) -> list[list[str]]:
    """A row for each network whose name matches a pattern."""
    import lambda_det
    from lambda_det.modeling.complexity import measure_named
    from lambda_det.modeling.specs import PaperFigures, get_spec

    names = []
    for pattern in patterns:
        matching = fnmatch.filter(lambda_det.list_models(), pattern)
        names += matching or [pattern]  # an unknown name is refused by get_spec
    table = []
    for name in dict.fromkeys(names):
        spec = get_spec(name)
        size = image_size or spec.image_size
        counted = measure_named(name, size)
        # Parameters don't depend on the image size; the paper's other figures do
        paper = spec.paper if size == spec.image_size else PaperFigures(spec.paper.params)
        table.append(
            [
                name,
                f"{counted.params / 1e6:.2f}",
                "" if paper.params is None else f"{paper.params:g}",
                str(size),
                f"{2 * counted.multiply_adds / 1e9:.2f}",
                f"{2 * counted.multiply_adds_query_first / 1e9:.2f}",
                "" if paper.flops is None else f"{paper.flops:g}",
                "" if paper.top1 is None else f"{paper.top1:g}",
                "; ".join(filter(None, (spec.paper.source, spec.paper.note))),
            ]
        )
    return table


HEADER = [
    "model",
    "params",
    "paper",
    "size",
    "GFLOPs",
    "GFLOPs qf",
    "paper",
    "top-1 (paper)",
    "source",
]


def print_table(table: list[list[str]], markdown: bool) -> None:
    if markdown:
        table.insert(1, ["---"] + ["---:"] * (len(HEADER) - 2) + ["---"])
        lines = ["| " + " | ".join(row) + " |" for row in table]
    else:
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = [
            "  ".join(
                cell.ljust(width) if index in (0, len(row) - 1) else cell.rjust(width)
                for index, (cell, width) in enumerate(zip(row, widths, strict=True))
            ).rstrip()
            for row in table
        ]
    print("\n".join(lines))


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    from lambda_det.errors import exit_status

    return exit_status(
        lambda: print_table([HEADER, *rows(args.models, args.image_size)], args.markdown)
    )


if __name__ == "__main__":
    sys.exit(main())
