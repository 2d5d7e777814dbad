"""Feed broken data sets to the package, for longer than the tests do, or made of one's own data.

Each case is a data set with something wrong in its annotation file or its images. It is looked
over, registered, loaded, trained on and evaluated on; each step must work or end in one of the
package's own errors. Ctrl-C ends it with what was found so far.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.detection.data.fuzz_cases import MUTATIONS, GroundTruth
from tests.detection.data.fuzz_trial import case_parser, take, take_all

EPILOG = """examples:
  python -m tests.detection.data.fuzz 5000
  python -m tests.detection.data.fuzz 5000 --json annotations.json --images images/
  python -m tests.detection.data.fuzz 1 --seed 1234 --kind images

Ends with status 0 where every case was used or refused, and 1 where one was not.
"""


def main(argv: list[str] | None = None) -> int:
    options = case_parser("tests.detection.data.fuzz", __doc__, MUTATIONS, EPILOG)
    options.add_argument("--json", type=Path, metavar="FILE", help="annotations in COCO's format")
    options.add_argument("--images", type=Path, metavar="DIR", help="the folder of their images")
    arguments = options.parse_args(argv)
    if bool(arguments.json) != bool(arguments.images):
        options.error("give both --json and --images, or neither")
    kinds = [arguments.kind] if arguments.kind else sorted(MUTATIONS)
    seeds = range(arguments.seed, arguments.seed + arguments.cases)
    with tempfile.TemporaryDirectory() as folder:
        if arguments.json:
            ground_truth = GroundTruth.read(arguments.json.resolve(), arguments.images.resolve())
        else:
            ground_truth = GroundTruth.made(Path(folder))
        return take_all(
            ((kinds[seed % len(kinds)], seed) for seed in seeds),
            lambda kind, seed: take(MUTATIONS[kind](ground_truth, seed), ground_truth),
        )


if __name__ == "__main__":
    sys.exit(main())
