"""Feed broken data sets to the package, for longer than the tests do, or made of one's own data.

Each case is a data set with something wrong in its annotation file or its images. It is looked
over, registered, loaded, trained on and evaluated on; each step must work or end in one of the
package's own errors. Ctrl-C ends it with what was found so far.
"""

from __future__ import annotations

import argparse
import faulthandler
import itertools
import logging
import signal
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.detection.data.fuzz_cases import MUTATIONS, GroundTruth
from tests.detection.data.fuzz_trial import Failures, Trial

EXAMPLES = """examples:
  python -m tests.detection.data.fuzz 5000
  python -m tests.detection.data.fuzz 5000 --json annotations.json --images images/
  python -m tests.detection.data.fuzz 1 --seed 1234 --kind images

Ends with status 0 where every case was used or refused, and 1 where one was not.
"""


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.detection.data.fuzz",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("cases", type=int, metavar="CASES", help="how many")
    parser.add_argument("--seed", type=int, default=0, help="of the first case (default: 0)")
    parser.add_argument("--kind", choices=sorted(MUTATIONS), help="one kind alone")
    parser.add_argument("--json", type=Path, metavar="FILE", help="annotations in COCO's format")
    parser.add_argument("--images", type=Path, metavar="DIR", help="the folder of their images")
    arguments = parser.parse_args(argv)
    if bool(arguments.json) != bool(arguments.images):
        parser.error("give both --json and --images, or neither")
    return arguments


def fuzz(arguments: argparse.Namespace, folder: Path) -> int:
    if arguments.json:
        ground_truth = GroundTruth.read(arguments.json.resolve(), arguments.images.resolve())
    else:
        ground_truth = GroundTruth.made(folder)
    kinds = [arguments.kind] if arguments.kind else sorted(MUTATIONS)
    trial = Trial(ground_truth, folder / "cases")
    outcomes: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
    failures = Failures()
    for number in _until_interrupted(arguments.cases):
        seed = arguments.seed + number
        kind = kinds[seed % len(kinds)]
        # Before the case, so that the last seed is the one that crashed Python, if one does
        print(f"\rcase {number + 1} of {arguments.cases}, seed {seed}", end="", file=sys.stderr)
        try:
            outcome = trial.take(MUTATIONS[kind](ground_truth, seed))
        except AssertionError as error:
            outcome = "FAILED"
            failures.add(kind, seed, str(error))
        outcomes[kind][outcome] += 1
    for kind, counts in outcomes.items():
        print(f"\n{kind}:")
        for outcome, count in counts.most_common():
            print(f"{count:9,} {outcome}")
    return failures.tell()


def _until_interrupted(cases: int) -> Iterator[int]:
    stopped: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, frame: stopped.append(number))
    yield from itertools.takewhile(lambda _: not stopped, range(cases))
    signal.signal(signal.SIGINT, before)


def main(argv: list[str] | None = None) -> int:
    arguments = parse_arguments(argv)
    faulthandler.enable()
    logging.disable(logging.INFO)
    logging.getLogger().addHandler(logging.NullHandler())  # the trial listens
    warnings.simplefilter("ignore")
    with tempfile.TemporaryDirectory() as folder:
        return fuzz(arguments, Path(folder))


if __name__ == "__main__":
    sys.exit(main())
