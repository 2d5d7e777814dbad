"""The ledger of promises names folders and tests that exist, and each promise has a fault."""

import re
from pathlib import Path

import pytest

from tests.faults import FAULTS

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[1]
PLACES = (2, 3)  # the columns of the folder and of the tests


def promises(page: str) -> list[list[str]]:
    """The cells of each row of a page's tables, without their heads."""
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows if row[0].strip() != "promise"]


ROWS = promises((ROOT / "docs" / "promises.md").read_text("utf-8"))


def test_every_promise_has_a_folder_a_test_and_a_state():
    assert ROWS
    for row in ROWS:
        assert len(row) == 5 and "`" in row[2] and "`tests/" in row[3], row
        assert row[4] in ("trained", "H200", "CPU", "never"), row
    named = [name for row in ROWS for place in PLACES for name in re.findall("`(.+?)`", row[place])]
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_promise_has_a_fault_that_its_tests_can_see():
    """`python -m tests.faults` looks whether they do."""
    said = []
    for fault in FAULTS:
        named = [row for row in ROWS if row[0].startswith(fault.promise)]
        if len(named) != 1:
            said.append(f"{len(named)} promises begin with {fault.promise!r}")
            continue
        if (count := (ROOT / fault.file).read_text("utf-8").count(fault.text)) != 1:
            said.append(f"{fault.file} has {fault.text!r} {count} times")
        for test in fault.tests:
            file, _, name = test.partition("::")
            if f"`{file}`" not in named[0][3]:
                said.append(f"{file} is no test of {fault.promise!r}")
            elif name and f"def {name.partition('[')[0]}(" not in (ROOT / file).read_text("utf-8"):
                said.append(f"{file} has no {name}")
    broken = tuple(fault.promise for fault in FAULTS)
    said += [f"{row[0]!r} has no fault" for row in ROWS if not row[0].startswith(broken)]
    assert said == []
