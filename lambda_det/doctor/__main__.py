"""Say what is installed here and what of it works, and how to mend what does not.

Prints the versions, the devices and the operators, which are really run, and then the known faults
and incompatibilities, each with its mend. It speaks where PyTorch or Detectron2 are missing, too.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import textwrap
import warnings

from lambda_det.doctor import Finding, devices, examine, operators, versions

EXAMPLES = """examples:
  python -m lambda_det.doctor
  python -m lambda_det.doctor --json > doctor.json     to be read by a program
  torchrun --nproc_per_node 2 -m lambda_det.doctor     in the environment of such a training

status: 0 if nothing was found that breaks; 1 otherwise
"""


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m lambda_det.doctor",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser.parse_args(argv)


def _print_findings(findings: list[Finding]) -> None:
    breaking = sum(finding.breaks for finding in findings)
    notes = len(findings) - breaking
    print(f"Found: {breaking} that break something, {notes} to know" if findings else "Found: none")
    for finding in sorted(findings, key=lambda finding: not finding.breaks):
        mark = "BREAKS" if finding.breaks else "note"
        print()
        print(textwrap.fill(finding.problem, 100, initial_indent=f"  {mark}: ", **_HANGING))
        print(f"    mend: {finding.mend}")  # in one piece, since it holds commands to be copied


_HANGING = {"subsequent_indent": "    ", "break_long_words": False, "break_on_hyphens": False}


def main(argv: list[str] | None = None) -> int:
    args = parse_args(argv)
    sections = {"versions": versions, "devices": devices, "operators": operators}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the faults are told below, in plainer words
        if args.json:
            content = {name: dict(section()) for name, section in sections.items()}
            findings = examine()
            content["findings"] = [dataclasses.asdict(finding) for finding in findings]
            print(json.dumps(content, indent=2))
        else:
            for name, section in sections.items():
                print(name.capitalize(), flush=True)
                for label, text in section():
                    print(f"  {label:<24}{text}", flush=True)
                print()
            findings = examine()
            _print_findings(findings)
    return int(any(finding.breaks for finding in findings))


if __name__ == "__main__":
    sys.exit(main())
