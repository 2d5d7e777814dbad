"""The parts of a data set, whose converted labels go to a folder of the tests."""

import tempfile
from pathlib import Path

from lambda_det.own_data import layouts

_DRAFTS = tempfile.TemporaryDirectory()


def draft_folder() -> Path:
    return Path(tempfile.mkdtemp(dir=_DRAFTS.name))


def find_parts(*places):
    return layouts.find_parts(*places, folder=draft_folder())
