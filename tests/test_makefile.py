"""`make setup` with stand-ins for Python, so that nothing is downloaded."""

import runpy
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
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools" / "install_detectron2.py").touch()
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


def test_set_up_runs_once(project):
    result, asked = setup(project)
    assert result.returncode == 0, result.stderr
    steps = [
        "venv --clear",
        "--requirement requirements.txt",
        "install_detectron2.py",
        "--editable",
    ]
    assert [asked.count(step) for step in steps] == [1, 1, 1, 1]
    assert sorted(steps, key=asked.index) == steps
    assert setup(project)[1] == ""


@pytest.mark.parametrize("step", ["--requirement requirements.txt", "install_detectron2.py"])
def test_a_set_up_cut_short_starts_from_nothing(project, step):
    assert setup(project, fail_at=step)[0].returncode != 0
    (project / ".venv" / "half-installed").touch()
    result, asked = setup(project)
    assert result.returncode == 0
    assert "venv --clear" in asked and "--editable" in asked
    assert not (project / ".venv" / "half-installed").exists()


def test_new_requirements_are_installed_into_the_environment(project):
    setup(project)
    (project / "requirements.txt").write_text("torch\n")
    asked = setup(project)[1]
    assert "--requirement requirements.txt" in asked and "--editable" in asked
    assert "venv" not in asked


def test_an_upgrade_cut_short_starts_from_nothing(project):
    setup(project)
    (project / "requirements.txt").write_text("torch\n")
    assert setup(project, fail_at="--requirement")[0].returncode != 0
    assert "venv --clear" in setup(project)[1]


def test_no_suitable_python_ends_in_one_sentence(project):
    result, _ = setup(project, fail_at="version_info")
    assert result.returncode != 0
    sentence = result.stderr.splitlines()[0]
    assert sentence.startswith("error: none of these is a Python 3.10 or newer")
    assert str(project / "python") in sentence and "make setup PYTHON=" in sentence
    assert not (project / ".venv").exists()


@pytest.mark.parametrize(
    ("target", "commands"),
    [
        ("test", ["-m pytest"]),
        ("lint", ["-m ruff check", "-m ruff format --check"]),
        ("demo", ["datasets/make_shapes.py", "train --config", "predict --model", "report output"]),
    ],
)
def test_every_target_has_the_environment(project, target, commands):
    result, asked = make(project, target, f"PYTHON={project}/python")
    assert result.returncode == 0, result.stderr
    for command in commands:
        assert asked.index("--editable") < asked.index(command)


def test_ci_runs_the_linter_and_the_tests_and_nothing_else(project):
    (project / ".ci").mkdir()
    shutil.copy(ROOT / ".ci" / "run", project / ".ci" / "run")
    (project / "Makefile").write_text("%:\n\t@echo target $@\n")

    def run():
        # Not the environment of `make test`, in which a make below says more than it would alone
        environment = {"PATH": "/usr/bin:/bin"}
        command = [project / ".ci" / "run"]
        return subprocess.run(command, cwd="/", env=environment, capture_output=True, text=True)

    result = run()
    assert result.stdout.split("\n")[:2] == ["target lint", "target test"]
    assert result.returncode == 0
    (project / "Makefile").write_text("lint:\n\t@exit 1\n%:\n\t@echo target $@\n")
    result = run()
    assert result.returncode != 0 and "target test" not in result.stdout


@pytest.mark.parametrize(
    ("row", "only", "status"),
    [
        (None, ["--only", "3.10:2.4.1"], 1),
        (None, [], 0),
        ("| 9 passed, 1 xfailed |", ["--only", "3.10:2.4.1"], 0),
        ("| 9 passed, 1 failed |", ["--only", "3.10:2.4.1"], 1),
        ("| 9 passed, 2 errors |", ["--only", "3.10:2.4.1"], 1),
    ],
)
def test_the_matrix_fails_with_its_tests_or_without_the_python_asked_for(
    monkeypatch, row, only, status
):
    matrix = runpy.run_path(str(ROOT / ".ci" / "matrix.py"))
    own = matrix["main"].__globals__
    monkeypatch.setitem(own, "run_pair", lambda pair, args: row)
    monkeypatch.setitem(own, "write_page", lambda rows: None)
    assert matrix["main"](only) == status
