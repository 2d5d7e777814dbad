"""The parts of a data set, whose converted labels go to a folder of the tests."""

import tempfile
from pathlib import Path

from lambda_det.own_data import layouts

_TEMPORARY = tempfile.TemporaryDirectory()


def temporary_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=_TEMPORARY.name))


def find_parts(*places):
    return layouts.find_parts(*places, folder=temporary_folder())[:2]
