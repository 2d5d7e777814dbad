"""The ledger of promises names folders and tests that exist, and each promise has a fault."""

import re
from pathlib import Path

import pytest

from tests.faults import FAULTS, Fault

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[1]
PLACES = (2, 3)  # the columns of the folder and of the tests


def promises(page: str) -> list[list[str]]:
    """The cells of each row of a page's tables, without their heads."""
    rows = [line.strip("|").split("|") for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in row] for row in rows if row[0].strip() != "promise"]


def missing(page: str) -> list[str]:
    """The places that a page's rows name and that are not in the repository."""
    rows = promises(page)
    named = [name for row in rows for place in PLACES for name in re.findall("`(.+?)`", row[place])]
    return [name for name in named if not (ROOT / name).exists()]


def test_every_promise_has_a_folder_a_test_and_a_state():
    rows = promises((ROOT / "docs" / "promises.md").read_text("utf-8"))
    assert rows
    for row in rows:
        assert len(row) == 5 and "`" in row[2] and "`tests/" in row[3], row
        assert row[4] in ("trained", "H200", "CPU", "never"), row


def test_every_place_is_there():
    assert missing((ROOT / "docs" / "promises.md").read_text("utf-8")) == []


def test_a_place_that_is_not_there_is_seen():
    row = "| a promise | 1 | `lambda_det/nowhere` | `tests/test_promises.py` | CPU |"
    assert missing(row) == ["lambda_det/nowhere"]


def wrong(faults: list[Fault], page: str) -> list[str]:
    """What is wrong with faults that should break each promise of a page."""
    rows, said = promises(page), []
    for fault in faults:
        named = [row for row in rows if row[0].startswith(fault.promise)]
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
    broken = tuple(fault.promise for fault in faults)
    return [*said, *(f"{row[0]!r} has no fault" for row in rows if not row[0].startswith(broken))]


def test_every_promise_has_a_fault_that_its_tests_can_see():
    """`python -m tests.faults` looks whether they do."""
    assert wrong(FAULTS, (ROOT / "docs" / "promises.md").read_text("utf-8")) == []


def test_a_fault_that_breaks_nothing_is_seen():
    page = "| one thing | 1 | | `tests/test_promises.py` | CPU |\n| two | 1 | | | CPU |"
    tests = ("tests/test_promises.py::test_nothing", "tests/test_docs.py")
    fault = Fault("one", "tests/test_docs.py", "no such text", "", tests)
    said = wrong([fault, fault._replace(promise="three")], page)
    words = ("has 'no such text' 0 times", "has no test_nothing", "test_docs.py is no test of")
    words += ("0 promises begin with 'three'", "'two' has no fault")
    assert [any(word in line for line in said) for word in words] == [True] * len(words)
    assert len(said) == len(words)
