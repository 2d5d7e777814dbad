"""Write docs/keys.md: every configuration key that lambda_det adds, from the comments above them.

    .venv/bin/python .ci/keys.py

A comment directly above a key of the three files is its sentence. A line that begins with
dashes is about the keys that follow, and is not on the page.
"""

import re
import runpy
from pathlib import Path
from typing import Any

from detectron2.config import get_cfg

from lambda_det.classification.config import get_classification_config
from lambda_det.config import add_lambda_config, leaves

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "keys.md"
DETECTION = ROOT / "lambda_det" / "config.py"
CLASSIFICATION = ROOT / "lambda_det" / "classification" / "config.py"
SETTINGS = ROOT / "configs" / "common" / "train.py"
_KEY = re.compile(r"    _C\.([A-Z0-9_.]+) = (?!CN\(\))")
_TABLE = re.compile(r"([A-Z_]+): dict\[str, Key\] = {")
_ROW = re.compile(r'    "([A-Z0-9_.]+)": Key\(')
_SECTIONS = {"LAMBDA_LAYER_KEYS": "MODEL.LAMBDA_RESNET.", "SOLVER_KEYS": "SOLVER.", "KEYS": ""}
_SETTING = re.compile(r'    "([a-z0-9_]+)": ')
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
keys of the lambda layers, as in detectors: from `QUERY_DEPTH` to `IMPLEMENTATION`. `SOLVER` has
those of optimisers and schedules: from `OPTIMIZER` to `POLY_LR_CONSTANT_ENDING`.
"""


def sentences(source: str) -> dict[str, str]:
    """The comment above each key of a file, by its full name."""
    comments: dict[str, str] = {}
    lines: list[str] = []
    section = ""
    for line in source.splitlines():
        if table := _TABLE.match(line):
            section = _SECTIONS[table[1]]
        if line.startswith("    # ----"):
            continue
        if comment := _COMMENT.fullmatch(line):
            lines.append(comment[1])
            continue
        if (row := _ROW.match(line)) and lines:
            comments[section + row[1]] = " ".join(lines)
        elif key := _KEY.match(line):
            comments[key[1]] = " ".join(lines)
        elif setting := _SETTING.match(line):
            comments[f"train.{setting[1]}"] = " ".join(lines)
        lines = []
    return comments


def _section(title: str, rows: dict[str, str], cfg: dict[str, Any]) -> list[str]:
    lines = [f"\n### {title}\n"]
    for key, sentence in rows.items():
        value = cfg
        for name in key.split("."):
            value = value[name]
        default = repr(value).replace("'", '"')
        text = sentence.replace("docs/layer.md", "[layer.md](layer.md)")
        lines.append(f"- `{key}` (`{default}`): {text}{'' if text.endswith('.') else '.'}")
    return lines


def _sections(source: Path, cfg: dict[str, Any], title: str) -> list[str]:
    """A list for each section of keys, and one of those in no section."""
    written = sentences(source.read_text("utf-8"))
    comments = {key: written[key] for key, _ in leaves(cfg) if key in written}
    lines = []
    for section in dict.fromkeys(key.partition(".")[0] for key in comments if "." in key):
        rows = {key: text for key, text in comments.items() if key.startswith(f"{section}.")}
        lines += _section(title.format(section), rows, cfg)
    alone = {key: text for key, text in comments.items() if "." not in key}
    return lines + _section(title.format("Keys in no section"), alone, cfg)


def page() -> str:
    """The text of docs/keys.md."""
    detection = get_cfg()
    add_lambda_config(detection)
    lines = [_HEAD.rstrip("\n"), *_sections(DETECTION, detection, "{}"), _LAZY.rstrip("\n")]
    settings = runpy.run_path(str(SETTINGS))
    lines += _section("train", sentences(SETTINGS.read_text("utf-8")), settings)
    lines.append(_CLASSIFIERS.rstrip("\n"))
    lines += _sections(CLASSIFICATION, get_classification_config(), "{} of classifiers")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), "utf-8")
