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


def test_a_curve_that_moves_is_seen():
    kept = [2.0 - step / 100 for step in range(30)]
    assert not moved(kept, [value * 1.000005 for value in kept])
    for step, by in ((0, 1.0001), (3, 1.01), (29, 2.0), (29, float("nan"))):
        other = list(kept)
        other[step] *= by
        assert f"step {step}:" in moved(kept, other)[0]
    assert moved(kept, kept[:-1])
