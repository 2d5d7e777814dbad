"""Write docs/keys.md: every configuration key that lambda_det adds, from the comments above them.

    .venv/bin/python .ci/keys.py

A comment directly above a key of the three files is its sentence. A line that begins with
dashes is about the keys that follow, and is not on the page.
"""

import re
import runpy
from collections import defaultdict
from pathlib import Path
from typing import Any

from lambda_det.classification.config import DEFAULTS
from lambda_det.config import KEYS

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "keys.md"
DETECTION = ROOT / "lambda_det" / "config.py"
CLASSIFICATION = ROOT / "lambda_det" / "classification" / "config.py"
SETTINGS = ROOT / "configs" / "common" / "train.py"
_KEY = re.compile(r'    "([A-Za-z0-9_.]+)": ')
_COMMENT = re.compile(r"    # (.*)")

_HEAD = """\
# Configuration keys

Every key that lambda_det adds to
[Detectron2's](https://detectron2.readthedocs.io/en/latest/modules/config.html), with its default.
Nobody writes this page: `.ci/keys.py` makes it of the comments in `lambda_det/config.py`,
`lambda_det/classification/config.py` and `configs/common/train.py`.

On a command line they are `KEY VALUE`, such as `SOLVER.EMA_DECAY 0.999`; those of a LazyConfig are
`train.max_iter=40`. In a LazyConfig the keys of `MODEL.LAMBDA_RESNET` are arguments with the same
names in lower case. A key that does not exist is refused with the name of a similar one.

## Detectors
"""
_LAZY = """
## LazyConfigs

The settings that the trainer reads from `train`; `train = get_config("common/train.py").train` has
the defaults.
"""
_CLASSIFIERS = """
## Classifiers

All keys of the recipes in `configs/imagenet` and `configs/cifar10`. `MODEL.LAMBDA_RESNET` has the
keys of the lambda layers, as in detectors: from `QUERY_DEPTH` to `IMPLEMENTATION`.
"""


def sentences(source: Path) -> dict[str, str]:
    """The comment above each key of a file."""
    comments: dict[str, str] = {}
    lines: list[str] = []
    for line in source.read_text("utf-8").splitlines():
        if line.startswith("    # ----"):
            continue
        if comment := _COMMENT.fullmatch(line):
            lines.append(comment[1])
            continue
        if (key := _KEY.match(line)) and lines:
            comments[key[1]] = " ".join(lines)
        lines = []
    return comments


def _sections(
    written: dict[str, str], defaults: dict[str, Any], title: str, table: str = ""
) -> list[str]:
    """A list for each section of keys; ``table`` begins the names of those that lack it there."""
    sections = defaultdict(list)
    for key, value in defaults.items():
        if text := written.get(key) or written.get(key.removeprefix(table)):
            section = key.partition(".")[0] if "." in key else "Keys in no section"
            default = repr(value).replace("'", '"')
            text = text.removesuffix(".").replace("docs/layer.md", "[layer.md](layer.md)")
            sections[section].append(f"- `{key}` (`{default}`): {text}.")
    return [
        line
        for section, rows in sections.items()
        for line in (f"\n### {title.format(section)}\n", *rows)
    ]


def page() -> str:
    """The text of docs/keys.md."""
    detection = {key: row.default for key, row in KEYS.items() if row.default is not None}
    train = runpy.run_path(str(SETTINGS))["train"]
    settings = {f"train.{name}": value for name, value in train.items()}
    lines = [_HEAD.rstrip("\n")]
    lines += _sections(sentences(DETECTION), detection, "{}", "MODEL.LAMBDA_RESNET.")
    lines += [_LAZY.rstrip("\n"), *_sections(sentences(SETTINGS), settings, "{}", "train.")]
    lines += [_CLASSIFIERS.rstrip("\n")]
    lines += _sections(
        sentences(DETECTION) | sentences(CLASSIFICATION), DEFAULTS, "{} of classifiers"
    )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
