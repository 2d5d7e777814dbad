"""The losses of small trainings are those that were kept; see tests/reliability/golden.py."""

import json

import pytest

from tests.reliability.golden import CASES, FILE, curve, moved

TABLE = json.loads(FILE.read_text("utf-8"))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_the_losses_are_those_that_were_kept(name, tmp_path):
    found = moved(TABLE["curves"][name], curve(name, tmp_path))
    assert not found, f"{found}; if that is meant: python -m tests.reliability.golden --reason WHY"
