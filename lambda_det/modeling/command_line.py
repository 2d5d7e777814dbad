"""``lambda-det info``: the networks, and the paper's figures beside their counts."""

from __future__ import annotations

import fnmatch
from typing import Any

from tabulate import tabulate

from lambda_det.errors import command_parser, exit_status

EXAMPLES = """examples:
  %(prog)s                        all networks, at the image size of the paper's figures
  %(prog)s 'lambda_resnet*'       those whose names match
  %(prog)s lambda_resnet152 --image-size 1024

columns:
  params, paper      millions of parameters with 1000 classes
  GFLOPs             2 per multiply-add, position lambdas built first, as in the paper's formulas
"""
HEADER = [
    "model",
    "params",
    "paper",
    "size",
    "GFLOPs",
    "paper",
    "top-1 (paper)",
    "source",
]


def rows(patterns: list[str], image_size: int | None = None) -> list[list[Any]]:
    """A row for each network whose name matches a pattern.

    Raises:
        ConfigError: there is no such network.
    """
    from lambda_det.modeling.complexity import measure_named
    from lambda_det.modeling.specs import PaperFigures, get_spec, list_models

    names = []
    for pattern in patterns:
        matching = fnmatch.filter(list_models(), pattern)
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
                paper.params,
                size,
                f"{2 * counted.multiply_adds / 1e9:.2f}",
                paper.flops,
                paper.top1,
                "; ".join(filter(None, (spec.paper.source, spec.paper.note))),
            ]
        )
    return table


def main(argv: list[str] | None = None) -> int:
    parser = command_parser(
        "info", "Print the networks: parameters, multiply-adds, and the paper's figures.", EXAMPLES
    )
    parser.add_argument("models", nargs="*", default=["*"], help="names or patterns; all if none")
    parser.add_argument("--image-size", type=int, help="side of the input instead of the paper's")
    args = parser.parse_args(argv)

    def show() -> None:
        table = rows(args.models, args.image_size)
        sides = ["left", *["right"] * (len(HEADER) - 2), "left"]
        print(tabulate(table, HEADER, "plain", disable_numparse=True, colalign=sides))

    return exit_status(show)
