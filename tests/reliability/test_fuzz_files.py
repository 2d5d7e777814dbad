"""Damaged files of each kind are used or refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reliability.fuzz_files import KINDS, take


@pytest.mark.slow
@pytest.mark.fuzz
@pytest.mark.parametrize("name", KINDS)
def test_each_case_is_used_or_refused(tmp_path, name):
    KINDS[name].make(tmp_path)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    outcomes = set()

    @given(seed=st.integers(0, 2**32))
    def each(seed):
        outcomes.add(take(KINDS[name], tmp_path, seed))

    each()
    assert any(outcome.endswith("Error") for outcome in outcomes)
    assert files == {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
