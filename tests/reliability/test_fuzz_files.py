"""Damaged files of each kind are used or refused; ``fuzz_files.py`` takes any number of cases."""

from __future__ import annotations

import pytest

from tests.reliability.fuzz_files import KINDS, take

SMALL, LARGE = 8, 30  # cases of a kind, without the marker and with it


@pytest.fixture(scope="module", params=KINDS)
def sound(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    KINDS[request.param].make(folder)
    return request.param, folder


@pytest.mark.parametrize(
    "seeds",
    [
        pytest.param(range(SMALL), marks=pytest.mark.slow),
        pytest.param(range(SMALL, SMALL + LARGE), marks=pytest.mark.fuzz),
    ],
    ids=str,
)
def test_each_case_is_used_or_refused(sound, seeds):
    name, folder = sound
    files = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    outcomes = set()
    for seed in seeds:
        try:
            outcomes.add(take(KINDS[name], folder, seed))
        except AssertionError as error:
            command = f"python -m tests.reliability.fuzz_files 1 --seed {seed} --kind {name}"
            pytest.fail(f"{command}\n{error}")
    assert any(outcome.endswith("Error") for outcome in outcomes)
    assert files == {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
