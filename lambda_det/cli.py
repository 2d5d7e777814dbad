"""The command ``lambda-det``, also ``python -m lambda_det``: a table of the commands below it."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

from lambda_det.errors import CommandParser, importing_detectron2, printing, suggest
from lambda_det.version import __version__

if TYPE_CHECKING:
    from lambda_det.training.config_file import ConfigFile

# For each name of a command the module and its function, which takes the words after the name and
# returns the exit status; and what the command does
COMMANDS = {
    "train": ("cli:train", "train or evaluate a detector or a classifier"),
    "check": ("own_data.command_line:main", "check labels and images before a run"),
    "convert": (
        "own_data.command_line:convert_main",
        "write labels of one tool in the format of another",
    ),
    "predict": ("detection.prediction.command_line:main", "draw predictions on images and videos"),
    "evaluate": (
        "own_data.command_line:evaluate_main",
        "evaluate a trained detector on other data",
    ),
    "report": ("own_data.command_line:report_main", "write one HTML page on a run"),
    "export": ("export.command_line:main", "write a detector or a backbone for other runtimes"),
    "backbone": ("export.backbone_command:main", "write a backbone file for detectors"),
    "push": (
        "own_data.command_line:push_main",
        "send a detector with its model card to the Hugging Face Hub",
    ),
    "info": ("modeling.command_line:main", "list the networks with their operations"),
    "doctor": ("doctor:main", "look for what is missing or broken here"),
    "run": ("run:main", "run a training script of Detectron2 with our backbones"),
}

# For each kind of file of ``lambda-det train``, as ``kind_of`` calls it, the parser with its flags.
# Any other file is a detector's.
PARSERS = {
    "LazyConfig": "detection.command_line:lazy_parser",
    "classifier": "classification.command_line:parser",
}
# Functions that add flags to those of a detector
FLAGS = ("own_data.flags:add_flags",)


def main(argv: list[str] | None = None) -> int:
    """Do what the words of a command line say, and return the exit status."""
    words = sys.argv[1:] if argv is None else argv
    return printing(lambda: _main(words or ["--help"]))


def _main(argv: list[str]) -> int:
    name, *words = argv
    if name in ("-h", "--help"):
        print(usage())
        return 0
    if name == "--version":
        print(f"lambda-det {__version__}")
        return 0
    if name not in COMMANDS:
        print(f"error: there is no command {name}{suggest(name, COMMANDS)}", file=sys.stderr)
        return 2
    try:
        with importing_detectron2():  # which a command does where its work begins
            return _named(COMMANDS[name][0])(words) or 0
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("detectron2", "fvcore", "iopath"):
            raise
        from lambda_det.doctor import INSTALL_DETECTRON2

        print(
            f"error: lambda-det {name} needs Detectron2 (there is no {error.name}), not on PyPI: "
            f"{INSTALL_DETECTRON2}; lambda-det doctor lists what is missing.",
            file=sys.stderr,
        )
        return 2


def usage() -> str:
    return "\n".join(
        [
            "usage: lambda-det COMMAND ...",
            "",
            "LambdaNetworks for Detectron2: train detectors and classifiers, and use them.",
            "",
            *(f"  {name:<10}{does}" for name, (_, does) in COMMANDS.items()),
            "",
            "lambda-det COMMAND --help shows the flags of a command, and examples.",
            "lambda-det --version prints the version.",
        ]
    )


def train(argv: list[str]) -> int:
    """Train what a file describes: a detector of YAML or a LazyConfig, or a classifier."""
    from lambda_det.training.command_line import main

    file = named_file(argv)
    return main(training_parser(file), argv, file)


def named_file(argv: list[str]) -> ConfigFile | None:
    """The file that a command line of ``lambda-det train`` names; None where it names none."""
    from lambda_det.training.command_line import add_config_flag

    only_file = CommandParser("lambda-det train", add_help=False)
    add_config_flag(only_file)
    name = only_file.parse_known_args(argv)[0].config_file
    if not name:
        return None
    from lambda_det.training.config_file import ConfigFile

    return ConfigFile(name)


def training_parser(file: ConfigFile | None) -> argparse.ArgumentParser:
    """The flags of ``lambda-det train``, which depend on what the named file describes."""
    kind = ""
    if file:
        from lambda_det.training.config_file import kind_of

        kind = kind_of(file)
    parser = _named(PARSERS.get(kind, "cli:detector_parser"))()
    parser.prog = "lambda-det train"
    if not file:
        parser.description = (
            "Train and evaluate what a file describes: a detector (YAML or a LazyConfig) or a "
            "classifier. Without --config it follows from the data and the machine. These are the "
            "flags of a detector; --config FILE --help shows the file's."
        )
    return parser


def detector_parser() -> argparse.ArgumentParser:
    """The flags of a detector's training, including those for own data."""
    from lambda_det.detection.command_line import parser

    result = parser([_named(name) for name in FLAGS])
    result.set_defaults(config_file=None)  # without a name it follows from machine and data
    return result


def _named(name: str) -> Callable[..., Any]:
    """The function that a row of a table names; its module is imported only where it is needed."""
    return resolve_name(f"lambda_det.{name}")
