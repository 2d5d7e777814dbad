"""`make setup` with stand-ins for Python, so that nothing is downloaded."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
INPUTS = ("Makefile", "requirements.txt", "setup.py", "pyproject.toml")
# Notes what it is asked for, makes an environment of itself, and fails where told to.
STAND_IN = """\
#!/bin/sh
echo "$*" >> "$LOG"
case "$*" in *"$FAIL_AT"*) exit 1;; esac
if [ "$1 $2 $3" = "-m venv --clear" ]; then
    rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; cp "$0" "$4/bin/lambda-det"
fi
"""

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")


@pytest.fixture
def project(tmp_path):
    for name in INPUTS:
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "lambda_det").mkdir()
    (tmp_path / "lambda_det" / "install_detectron2.py").touch()
    python = tmp_path / "python"
    python.write_text(STAND_IN)
    python.chmod(0o755)
    return tmp_path


def make(project, *arguments, fail_at="nowhere"):
    """Run make; return its result and what Python was asked for in that run."""
    log = project / "log"
    log.write_text("")
    environment = {"PATH": "/usr/bin:/bin", "LOG": str(log), "FAIL_AT": fail_at}
    result = subprocess.run(
        ["make", *arguments], cwd=project, env=environment, capture_output=True, text=True
    )
    return result, log.read_text()


def setup(project, **options):
    return make(project, "setup", f"PYTHON=./missing {project}/python", **options)


STEPS = ["venv --clear", "--requirement requirements.txt", "install_detectron2.py", "--editable"]


def test_set_up_runs_once_and_installs_new_requirements(project):
    result, asked = setup(project)
    assert result.returncode == 0, result.stderr
    assert [asked.count(step) for step in STEPS] == [1, 1, 1, 1]
    assert sorted(STEPS, key=asked.index) == STEPS
    assert setup(project)[1] == ""
    (project / "requirements.txt").write_text("torch\n")
    asked = setup(project)[1]
    assert "--requirement requirements.txt" in asked and "--editable" in asked
    assert "venv" not in asked


@pytest.mark.parametrize("step", STEPS[1:3])
@pytest.mark.parametrize("is_new", [True, False], ids=["first", "upgrade"])
def test_a_set_up_cut_short_starts_from_nothing(project, step, is_new):
    if not is_new:
        setup(project)
        (project / "requirements.txt").write_text("torch\n")
    assert setup(project, fail_at=step)[0].returncode != 0
    (project / ".venv" / "half-installed").touch()
    result, asked = setup(project)
    assert result.returncode == 0
    assert "venv --clear" in asked and "--editable" in asked
    assert not (project / ".venv" / "half-installed").exists()


def test_no_suitable_python_ends_in_one_sentence(project):
    result, _ = setup(project, fail_at="version_info")
    assert result.returncode != 0
    sentence = result.stderr.splitlines()[0]
    assert sentence.startswith("error: none of these is a Python 3.11 or newer")
    assert str(project / "python") in sentence and "make setup PYTHON=" in sentence
    assert not (project / ".venv").exists()


def test_the_demo_has_the_environment_first(project):
    result, asked = make(project, "demo", f"PYTHON={project}/python")
    assert result.returncode == 0, result.stderr
    commands = ["--editable", "make_shapes.py", "train --config", "predict output", "report output"]
    assert sorted(commands, key=asked.index) == commands
