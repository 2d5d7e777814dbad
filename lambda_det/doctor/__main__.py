"""Print what is installed here and what of it works, and how to mend what does not.

Prints the versions, the packages, which are really run, Detectron2's own report of the environment,
and then the known faults and incompatibilities, each with its mend. It works where PyTorch or
Detectron2 are missing, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import platform
import sys
import textwrap
import warnings

from lambda_det.doctor.conditions import CONDITIONS
from lambda_det.doctor.parts import (
    PARTS,
    Finding,
    error_of_import,
    first_line,
    folder_of,
    version,
)

EXAMPLES = """examples:
  python -m lambda_det.doctor
  python -m lambda_det.doctor --json > doctor.json     to be read by a program
  torchrun --nproc_per_node 2 -m lambda_det.doctor     in the environment of such a training
  python -m lambda_det.doctor --gpu --config-file configs/mask_rcnn_lambdaresnet50.yaml --batch 1 4
  python -m lambda_det.doctor --gpu --model lambda_resnet50 --image-size 224 --batch 64 \
      --channels-last

With --gpu it proves the implementations of the lambda layer on the GPU, for the sizes of a network,
and writes what auto goes by from then on (docs/gpu.md). It takes some minutes.

status: 0 if nothing was found that breaks; 1 otherwise; 2 if --gpu cannot work here
"""
_DISTRIBUTIONS = (
    *("lambda_det", "detectron2", "torch", "torchvision", "triton", "numpy", "fvcore", "iopath"),
    *("omegaconf", "pycocotools", "opencv-python-headless", "opencv-python"),
    *("opencv-contrib-python", "pillow", "timm", "shapely", "setuptools", "onnx", "onnxruntime"),
)
_FILL = {"width": 100, "subsequent_indent": "    "}
_WHOLE_WORDS = {"break_long_words": False, "break_on_hyphens": False}  # commands are to be copied


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="lambda-det doctor",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--gpu", action="store_true", help="prove the kernels on this GPU")
    gpu = parser.add_argument_group("with --gpu, the network whose layers are proved")
    network = gpu.add_mutually_exclusive_group()
    network.add_argument(
        "--config-file", metavar="FILE", help="YAML or LazyConfig, of a detector or a classifier"
    )
    network.add_argument("--model", default="lambda_resnet50", help="by name (%(default)s)")
    gpu.add_argument(
        "--image-size", type=_positive, metavar="N", help="that of the file; of a model 224"
    )
    gpu.add_argument(
        "--batch", type=_positive, nargs="+", default=[2], metavar="B", help="images at once (2)"
    )
    gpu.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="that of the file; of a model bfloat16",
    )
    gpu.add_argument("--channels-last", action="store_true", help="as classifiers are trained")
    return parser.parse_args(argv)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def prove_on_gpu(args: argparse.Namespace) -> int:
    """``--gpu``; it needs PyTorch and Detectron2, which are imported for it alone."""
    for module in ("torch", "detectron2.modeling", "lambda_det.modeling"):
        if error := error_of_import(module):
            print(f"error: --gpu needs {module} ({error}); mend it first:", file=sys.stderr)
            print("  python -m lambda_det.doctor", file=sys.stderr)
            return 2
    gpu = importlib.import_module("lambda_det.doctor.gpu")
    return importlib.import_module("lambda_det.errors").exit_status(lambda: gpu.main(args))


def versions() -> dict[str, str]:
    """Python, the machine, and the packages that matter here."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    lines = {
        "python": f"{platform.python_version()}, {sys.executable}",
        "system": f"{platform.platform()}, {cores} cores",
    }
    lines |= {name: version(name) or "not installed" for name in _DISTRIBUTIONS}
    for package in ("lambda_det", "detectron2"):
        lines[package] += f", {folder_of(package)}" if folder_of(package) else ""
    return lines


def environment() -> str:
    """What Detectron2 prints about its environment: GPUs, driver, compilers, build options."""
    try:
        return importlib.import_module("detectron2.utils.collect_env").collect_env_info()
    except Exception as error:
        return f"Detectron2 cannot collect it ({first_line(error)})"


def examine() -> tuple[dict[str, str], list[Finding]]:
    """What each part says, and all faults."""
    lines, findings = {}, []
    for part in PARTS:
        lines[part.name], finding = part.examine()
        findings.append(finding)
    findings += [condition.examine() for condition in CONDITIONS]
    return lines, [finding for finding in findings if finding is not None]


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
    args = parse_args(argv)
    if args.gpu:
        return prove_on_gpu(args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the findings say it more clearly
        parts, findings = examine()
        if args.json:
            report = {"versions": versions(), "parts": parts, "environment": environment()}
            report["findings"] = [dataclasses.asdict(finding) for finding in findings]
            print(json.dumps(report, indent=2))
        else:
            _print_section("Versions", versions())
            _print_section("Packages", parts)
            print(f"Environment\n{textwrap.indent(environment(), '  ')}")
            _print_findings(findings)
    return int(any(finding.breaks for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
