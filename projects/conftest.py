"""The tests of a project find its package beside them, and have the fixtures of tests/."""

import sys
from pathlib import Path

from tests.conftest import (  # noqa: F401
    catalogs_as_they_were,
    environment_collected_once,
    first_batch_drawn_small,
    fixed_seeds,
    loggers_as_they_were,
)

sys.path[:0] = [str(path) for path in Path(__file__).parent.iterdir() if path.is_dir()]
