"""The ledger of promises names folders and tests that exist."""

import re
from pathlib import Path

import pytest

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
        assert row[4] in ("trained", "CPU", "never"), row


def test_every_place_is_there():
    assert missing((ROOT / "docs" / "promises.md").read_text("utf-8")) == []


def test_a_place_that_is_not_there_is_seen():
    row = "| a promise | 1 | `lambda_det/nowhere` | `tests/test_promises.py` | CPU |"
    assert missing(row) == ["lambda_det/nowhere"]
