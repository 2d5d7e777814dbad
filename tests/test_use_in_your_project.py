"""The page on use in other projects, executed: its files, and its commands in their order."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # trains

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "use_in_your_project.md"
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# The page has steps enough to learn something; here it is enough that they are taken.
_SHORTER = {
    'make_shapes("datasets")': 'make_shapes("datasets", num_train=12, num_val=4)',
    "MAX_ITER: 300": "MAX_ITER: 2",
    "MAX_ITER 20": "MAX_ITER 1",
    "max_iter=20": "max_iter=3",
    "--position 40 80": "--position 40 80 --draws 1",
}


def _shorter(text: str) -> str:
    for long, short in _SHORTER.items():
        text = text.replace(long, short)
    return text


def _blocks() -> list[tuple[str, str]]:
    return [(kind, _shorter(text)) for kind, text in _BLOCK.findall(PAGE.read_text("utf-8"))]


COMMANDS = [text.strip() for kind, text in _blocks() if kind == "sh"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project's folder with the files of the page."""
    for kind, text in _blocks():
        if kind != "sh":
            name = re.match(r"# (\S+)\n", text)
            assert name, f"a block does not begin with the name of its file: {text[:60]!r}"
            (tmp_path / name[1]).write_text(text, "utf-8")
    return tmp_path


def test_the_page_is_complete():
    text = PAGE.read_text("utf-8")
    assert all(long in text for long in _SHORTER)
    assert {"sh", "python", "yaml"} == {kind for kind, _ in _blocks()}


def test_the_commands_do_what_the_page_says(folder: Path):
    """One after the other: each may use what those before it have made."""
    environment = {
        **os.environ,
        "LAMBDA_DET": str(ROOT),
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }
    environment.pop("DETECTRON2_DATASETS", None)  # the page makes its data in datasets/
    for command in COMMANDS:
        done = subprocess.run(
            ["bash", "-e", "-c", command],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
