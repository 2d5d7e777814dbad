"""``lambda-det doctor``, also ``python -m lambda_det.doctor``."""

from __future__ import annotations

import argparse
import importlib
import os
import platform
import sys
import textwrap
import warnings

from lambda_det.doctor.checks import Fault, Finding, examine, first_line, folder_of, version
from lambda_det.errors import command_parser

DESCRIPTION = """\
Print what is installed here and what of it works, and how to mend what does not: the versions,
what was tried, Detectron2's own report of the environment, and each fault with its mend. It works
where PyTorch or Detectron2 are missing, too.
"""
EXAMPLES = """examples:
  %(prog)s
  %(prog)s --gpu

With --gpu it proves the kernels of the lambda layer on the GPU, and writes what auto goes by from
then on (docs/gpu.md). It takes some minutes.

status: 0 if nothing was found that breaks; 1 otherwise; 2 if --gpu cannot work here
"""
_DISTRIBUTIONS = (
    *("lambda_det", "detectron2", "torch", "torchvision", "triton", "numpy", "fvcore", "iopath"),
    *("omegaconf", "pycocotools", "opencv-python-headless", "opencv-python"),
    *("opencv-contrib-python", "pillow", "timm", "shapely", "setuptools", "onnx", "onnxruntime"),
)
_FILL = {"width": 100, "subsequent_indent": "    "}
_WHOLE_WORDS = {"break_long_words": False, "break_on_hyphens": False}  # commands are to be copied


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = command_parser("doctor", DESCRIPTION, EXAMPLES)
    parser.add_argument("--gpu", action="store_true", help="prove the kernels on this GPU")
    return parser.parse_args(argv)


def prove_on_gpu() -> int:
    """``--gpu``; only this needs PyTorch."""
    try:
        gpu = importlib.import_module("lambda_det.doctor.gpu")
    except Exception as error:
        print(f"error: --gpu cannot work here ({first_line(error)}); first run:", file=sys.stderr)
        print("  lambda-det doctor", file=sys.stderr)
        return 2
    return gpu.main()


def versions() -> dict[str, str]:
    """Python, the machine, and the packages that matter here."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines = {
        "python": f"{platform.python_version()}, {sys.executable}",
        "system": f"{platform.platform()}, {cores} cores",
    }
    lines |= {name: version(name) or "not installed" for name in _DISTRIBUTIONS}
    for package in ("lambda_det", "detectron2"):
        try:
            lines[package] += f", {folder}" if (folder := folder_of(package)) else ""
        except Fault as fault:
            lines[package] += f", {fault.args[0]}"
    return lines


def environment() -> str:
    """What Detectron2 prints about its environment: GPUs, driver, compilers, build options."""
    try:
        return importlib.import_module("detectron2.utils.collect_env").collect_env_info()
    except Exception as error:
        return f"Detectron2 cannot collect it ({first_line(error)})"


def _print_section(title: str, lines: dict[str, str]) -> None:
    print(title)
    for label, text in lines.items():
        print(f"  {label:<30}{text}")
    print(flush=True)


def _print_findings(findings: list[Finding]) -> None:
    breaking = sum(finding.breaks for finding in findings)
    notes = len(findings) - breaking
    print(f"Found: {breaking} that break something, {notes} to know" if findings else "Found: none")
    for finding in sorted(findings, key=lambda finding: not finding.breaks):
        mark = "  BREAKS: " if finding.breaks else "  note: "
        print("\n" + textwrap.fill(finding.problem, initial_indent=mark, **_FILL, **_WHOLE_WORDS))
        print(f"    mend: {finding.mend}")  # on one line, since it holds commands


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    if args.gpu:
        return prove_on_gpu()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the findings say it more clearly
        parts, findings = examine()
        _print_section("Versions", versions())
        _print_section("Tried", parts)
        print(f"Environment\n{textwrap.indent(environment(), '  ')}")
        _print_findings(findings)
    return int(any(finding.breaks for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
