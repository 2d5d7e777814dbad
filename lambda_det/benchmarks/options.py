"""The command line of the presets: what they have in common, and what is refused before the work.

An option of one preset is refused by the others, so that nobody believes it was followed.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import NoReturn

import torch

from lambda_det.benchmarks.measure import Setting
from lambda_det.benchmarks.memory import available_memory
from lambda_det.errors import ConfigError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one sentence, as all our tools do, instead of printing the usage."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{self.prog}: {message}.")


def parse_preset(
    argv: list[str] | None,
    presets: Mapping[str, ModuleType],
    *,
    default: str,
    description: str,
    epilog: str,
) -> argparse.Namespace:
    """Read ``--preset``, then the options of that preset.

    Raises:
        ConfigError: if an option belongs to another preset, or to none.
    """
    plain = argparse.RawDescriptionHelpFormatter
    summaries = "\n".join(f"  {name:10} {_summary(module)}" for name, module in presets.items())
    first = _Parser(
        prog="benchmark.py",
        description=description,
        epilog=f"presets:\n{summaries}\n\n{epilog}",
        formatter_class=plain,
        add_help=False,
        allow_abbrev=False,
    )
    first.add_argument("--preset", choices=presets, metavar="NAME", help=f"({default})")
    asked, rest = first.parse_known_args(argv)
    if asked.preset is None and {"-h", "--help"} & set(rest):
        first.add_argument("-h", "--help", action="help", help="show this and end")
        first.print_help()
        raise SystemExit(0)
    name = asked.preset or default
    parser = preset_parser(name, presets[name])
    args, unknown = parser.parse_known_args(rest)
    for option in unknown:
        flag = option.partition("=")[0]
        others = [
            other
            for other, module in presets.items()
            if flag in preset_parser(other, module)._option_string_actions
        ]
        if others:
            raise ConfigError(
                f"{flag} is no option of --preset {name}, but of {', '.join(others)}; leave it out "
                "or choose another preset."
            )
        raise ConfigError(
            f"--preset {name} knows no {option!r}; tools/benchmark.py --preset {name} --help lists "
            "what it knows."
        )
    args.preset = name
    if args.runs is not None and args.runs < 1:
        raise ConfigError(f"--runs is {args.runs}; give 1 or more.")
    for option, path in (("--json", args.json), ("--plot", getattr(args, "plot", None))):
        if path is not None:
            check_new_file(option, path)
    if args.json is not None and args.json == getattr(args, "plot", None):
        raise ConfigError(f"--json and --plot are both {args.json}; name two files.")
    return args


def preset_parser(name: str, module: ModuleType) -> argparse.ArgumentParser:
    """The parser of all that one preset can be told, but ``--preset`` itself."""
    parser = _Parser(
        prog=f"benchmark.py --preset {name}",
        description=module.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--runs", type=int, help="rounds that are counted (5; --small: 3)")
    parser.add_argument("--json", metavar="FILE", help="write all figures to a new file")
    module.add_arguments(parser)
    return parser


def _summary(module: ModuleType) -> str:
    return module.__doc__.partition("\n\n")[0].replace("\n", " ")


def add_common(
    parser: argparse.ArgumentParser, *, batch: str = "", channels_last: bool = True
) -> None:
    """Add what every preset that runs PyTorch modules understands.

    Args:
        parser: of the preset.
        batch: what the batch is by default; empty for a preset whose batches are fixed.
        channels_last: whether the inputs are maps [B, C, H, W].
    """
    parser.add_argument("--small", action="store_true", help="a form for two cores and two minutes")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N (%(default)s)")
    parser.add_argument(
        "--dtype",
        choices=DTYPES,
        default="float32",
        help="of the products, the others by autocast (%(default)s)",
    )
    if channels_last:
        parser.add_argument(
            "--channels-last", action="store_true", help="weights and maps in that memory format"
        )
    if batch:
        parser.add_argument("--batch", type=int, metavar="N", help=f"images at a time ({batch})")
    parser.add_argument(
        "--memory-limit",
        type=float,
        metavar="GB",
        help="of tensors on the CPU, beyond which a case is out of memory (what is available)",
    )
    parser.add_argument("--plot", metavar="FILE.png", help="draw the figures to a new file")


def setting_of(args: argparse.Namespace) -> Setting:
    """The device and the rest of what all cases have in common.

    Raises:
        ConfigError: if there is no such device, or a number cannot be.
    """
    device = check_device(args.device)
    if getattr(args, "batch", None) is not None and args.batch < 1:
        raise ConfigError(f"--batch is {args.batch}; give 1 or more.")
    limit = None
    if device.type != "cpu" and args.memory_limit is not None:
        raise ConfigError(
            f"--memory-limit is for the CPU, but --device is {args.device}; leave it out, since a "
            "GPU says itself when its memory ends."
        )
    if args.memory_limit is not None:
        if not args.memory_limit > 0:
            raise ConfigError(f"--memory-limit is {args.memory_limit:g}; give more than 0.")
        limit = int(args.memory_limit * 1e9)
    elif device.type == "cpu":
        limit = available_memory()
    return Setting(
        device=device,
        dtype=DTYPES[args.dtype],
        channels_last=getattr(args, "channels_last", False),
        rounds=args.runs or (3 if args.small else 5),
        memory_limit=limit,
    )


def check_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ConfigError: if it is neither the CPU nor a GPU of this machine.
    """
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ConfigError(f"--device is {name!r}; give cpu, cuda or cuda:N.")
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if count == 0:
            raise ConfigError(
                f"--device is {name}, but PyTorch finds no GPU here; give cpu, or install a "
                "PyTorch for the GPU."
            )
        if (device.index or 0) >= count:
            raise ConfigError(f"--device is {name}, but there are only {count} GPUs here.")
    return device


def check_new_file(option: str, name: str) -> None:
    """Refuse, before the work, a file that could not be written after it.

    Raises:
        ConfigError: if the file exists, its folder doesn't, or a plot is no PNG.
    """
    path = Path(name)
    folder = path.resolve().parent
    if path.exists() or path.is_symlink():
        raise ConfigError(f"{option} {name} exists; name a new file or move that one away.")
    if not folder.is_dir():
        raise ConfigError(f"{option} {name} lies in no folder; make the folder first.")
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"{option} {name} lies in a folder that cannot be written to.")
    if option == "--plot" and path.suffix.lower() != ".png":
        raise ConfigError(f"{option} {name} is no PNG file; let its name end with .png.")
