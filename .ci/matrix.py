#!/usr/bin/env python
"""Run the quick tests under pairs of Python and PyTorch, and write the table of docs/versions.md.

Each pair gets an environment of its own, of 3 to 6 GB, which is removed after its run. Interpreters
are searched on the PATH and among pyenv's; a pair without an interpreter is left out, and its row
in the table stays as it was.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "versions.md"
MARKERS = "not (slow or fuzz or benchmark or gpu or release)"


class Pair(NamedTuple):
    """The versions that are tested together."""

    python: str
    torch: str
    torchvision: str
    numpy: str

    @property
    def name(self) -> str:
        return f"{self.python}:{self.torch}"


# Each version of Python at least once, the oldest versions together, the first PyTorch whose
# `weights_only` is safe (2.10), and one between 2.4 and that. PyTorch 2.4 has no wheels for Python
# 3.13.
PAIRS = [
    Pair("3.11", "2.4.1", "0.19.1", "1.26.4"),
    Pair("3.11", "2.15.0", "0.29.2", "2.4.6"),
    Pair("3.12", "2.4.1", "0.19.1", "1.26.4"),
    Pair("3.12", "2.7.1", "0.22.1", "2.2.6"),
    Pair("3.12", "2.10.0", "0.25.0", "2.2.6"),
    Pair("3.13", "2.15.0", "0.29.2", "2.4.6"),
    Pair("3.14", "2.15.0", "0.29.2", "2.4.6"),
]
HEAD = """\
# Versions

`make matrix` runs the quick tests (those of `make test`) under each pair of Python and PyTorch, in
an environment of its own, and writes this table. `.ci/matrix.py --only 3.11:2.4.1` runs one pair.
On a push, `.github/workflows/test.yml` does the same.

| Python | PyTorch | NumPy | Detectron2 | system | quick tests |
|---|---|---|---|---|---|
"""


def find_python(version: str) -> str | None:
    """A Python of a version such as "3.11" that can make environments."""
    root = os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv"
    pyenv = sorted(Path(root, "versions").glob(f"{version}.*/bin/python"))
    for python in (sys.executable, f"python{version}", *map(str, pyenv)):
        code = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2])"
        try:
            said = subprocess.run([python, "-c", code], capture_output=True, text=True)
        except OSError:
            continue
        if said.returncode == 0 and said.stdout.strip() == version:
            return python
    return None


def make_environment(pair: Pair, python: str, folder: Path) -> Path:
    """Install everything into a new environment; return its Python."""
    subprocess.run([python, "-m", "venv", "--clear", folder], check=True)
    own = folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")
    pip = [own, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
    pins = [f"torch=={pair.torch}", f"torchvision=={pair.torchvision}", f"numpy=={pair.numpy}"]
    # detectron2.model_zoo imports pkg_resources, which setuptools 81 does not have
    build = ["setuptools>=70.1,<81", "wheel"]
    subprocess.run([*pip, *pins, *build], check=True)
    tests = ["pytest>=8", "pytest-xdist", "hypothesis", "scipy"]
    tests += ["fastapi", "httpx", "prometheus_client", "uvicorn"]  # of projects/serving
    subprocess.run([*pip, *pins, *build, *tests, f"{ROOT}[onnx,pretraining]"], check=True)
    # the tests run in the checkout, because they must import its modules
    subprocess.run([*pip[:-2], "uninstall", "--yes", "--quiet", "lambda_det"], check=True)
    subprocess.run([own, ROOT / "tools" / "install_detectron2.py"], check=True)
    return own


def describe_detectron2(python: Path) -> str:
    """Version of the Detectron2 of an environment, and whether it has compiled operators."""
    code = (
        "import importlib.util as u, detectron2 as d;"
        "print(d.__version__, 'compiled' if u.find_spec('detectron2._C') else 'Python files')"
    )
    said = subprocess.run([python, "-W", "ignore", "-c", code], capture_output=True, text=True)
    return said.stdout.strip() or "missing"


def run_tests(python: Path) -> str:
    """Run the quick tests; return pytest's last line without the time."""
    command = [python, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", MARKERS]
    command += ["-n", "2", "--dist", "loadfile"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = subprocess.run(
        command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, errors="replace"
    )
    print(run.stdout, flush=True)
    last = run.stdout.strip().rpartition("\n")[2]
    last = re.sub(r", \d+ (deselected|warnings?)|in [\d.]+s.*|=", "", last).strip()
    return last or f"ended with status {run.returncode}"


def read_rows() -> dict[str, str]:
    """The rows of the page, by pair."""
    rows = re.findall(r"^(\| (3\.\d+) \| (\S+) \|.*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    return {f"{python}:{torch}": row for row, python, torch in rows}


def write_page(rows: dict[str, str]) -> None:
    missing = "| {0.python} | {0.torch} | {0.numpy} | | | not run |"
    lines = [rows.get(pair.name) or missing.format(pair) for pair in PAIRS]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n", "utf-8")


def run_pair(pair: Pair) -> str | None:
    """Test a pair; return its row, or None if there is no such Python."""
    python = find_python(pair.python)
    if python is None:
        print(f"{pair.name}: there is no Python {pair.python} here", flush=True)
        return None
    folder = ROOT / ".matrix" / pair.name.replace(":", "-torch")
    print(f"{pair.name}: in {folder}", flush=True)
    try:
        own = make_environment(pair, python, folder)
        detectron2, result = describe_detectron2(own), run_tests(own)
    except subprocess.CalledProcessError as error:
        detectron2, result = "", f"not installed: {Path(str(error.cmd[0])).name} failed"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    system = f"{platform.system()} {platform.machine()}"
    cells = [pair.python, pair.torch, pair.numpy, detectron2, system, result]
    return f"| {' | '.join(cells)} |"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", nargs="+", metavar="PYTHON:TORCH", choices=[p.name for p in PAIRS], help="pairs"
    )
    only = parser.parse_args(argv).only
    failed = False
    for pair in PAIRS:
        if only and pair.name not in only:
            continue
        row = run_pair(pair)
        if row is None:
            failed |= bool(only)  # the pair was asked for
        else:
            print(row, flush=True)
            write_page({**read_rows(), pair.name: row})
            failed |= not re.search(r"\d passed", row) or bool(re.search(r"\d (failed|error)", row))
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
