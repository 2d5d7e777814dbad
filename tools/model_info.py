#!/usr/bin/env python
"""Print the networks: parameters, multiply-adds, and the paper's figures beside them."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

# The counts at the image size of the paper's figures, by name: to import PyTorch and Detectron2
# takes longer than all else
COUNTED = Path(__file__).with_suffix(".json")

EXAMPLES = """examples:
  tools/model_info.py                        all networks, at the image size of the paper's figures
  tools/model_info.py 'lambda_resnet*'       those whose names match
  tools/model_info.py lambda_resnet152 --image-size 1024 --markdown

columns:
  params, paper      millions of parameters with 1000 classes
  GFLOPs             2 per multiply-add, position lambdas built first, as the paper counts
  GFLOPs qf          the same with the query contracted first, as lambda_det computes them

Counts at the paper's image size are read from model_info.json. --count counts all networks anew and
writes that file.
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=["*"], help="names or patterns; all if none")
    parser.add_argument("--image-size", type=int, help="side of the input instead of the paper's")
    parser.add_argument("--count", action="store_true", help="count, and keep the counts of all")
    parser.add_argument("--markdown", action="store_true", help="print a Markdown table")
    return parser.parse_args(argv)


def rows(patterns: list[str], image_size: int | None) -> list[list[str]]:
    """A row for each network whose name matches a pattern."""
    from lambda_det.modeling.specs import PaperFigures, get_spec, list_models

    names = []
    for pattern in patterns:
        matching = fnmatch.filter(list_models(), pattern)
        names += matching or [pattern]  # an unknown name is refused by get_spec
    kept = json.loads(COUNTED.read_text("utf-8"))
    table = []
    for name in dict.fromkeys(names):
        spec = get_spec(name)
        size = image_size or spec.image_size
        kept_size, *kept_counts = kept.get(name, [None])
        params, lambda_first, query_first = kept_counts if size == kept_size else count(name, size)
        # Parameters don't depend on the image size; the paper's other figures do
        paper = spec.paper if size == spec.image_size else PaperFigures(spec.paper.params)
        table.append(
            [
                name,
                f"{params / 1e6:.2f}",
                "" if paper.params is None else f"{paper.params:g}",
                str(size),
                f"{2 * lambda_first / 1e9:.2f}",
                f"{2 * query_first / 1e9:.2f}",
                "" if paper.flops is None else f"{paper.flops:g}",
                "" if paper.top1 is None else f"{paper.top1:g}",
                "; ".join(filter(None, (spec.paper.source, spec.paper.note))),
            ]
        )
    return table


def count(name: str, size: int) -> list[int]:
    """Parameters, and multiply-adds with the lambda and with the query contracted first."""
    with warnings.catch_warnings():
        # As lambda_det imports Detectron2
        warnings.filterwarnings("ignore", r".*torch\.jit\.script", FutureWarning)
        from lambda_det.modeling.complexity import measure_named

    counted = measure_named(name, size)
    return [counted.params, counted.multiply_adds, counted.multiply_adds_query_first]


def count_all() -> str:
    """The content of ``COUNTED``: image size and counts of every network."""
    from lambda_det.modeling.specs import get_spec, list_models

    lines = []
    for name in list_models():
        size = get_spec(name).image_size
        lines.append(f"{json.dumps(name)}: {json.dumps([size, *count(name, size)])}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


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


def show(args: argparse.Namespace) -> None:
    if args.count:
        COUNTED.write_text(count_all(), "utf-8")
    print_table([HEADER, *rows(args.models, args.image_size)], args.markdown)


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    from lambda_det.errors import exit_status

    return exit_status(lambda: show(args))


if __name__ == "__main__":
    sys.exit(main())
