"""Install Detectron2, which is not on PyPI: ``lambda-det doctor --install``.

A Detectron2 that can be imported is left as it is. Otherwise it comes from

1. git: the pinned upstream commit, built with its C++ operators; or, where that fails,
2. a wheel: another project on PyPI has Detectron2's Python files of early 2023 in its wheel. Its
   SHA-256 is checked and the import name restored. The C++ operators are not in it; Mask R-CNN does
   not need them.

``--source FOLDER`` builds a local checkout instead.

Detectron2's setup.py imports torch, so a build in an isolated environment ends with "No module
named 'torch'". This program builds with --no-build-isolation, by pip or, in an environment without
pip, by uv. Its dependencies must be there before: its wheel brings them, and in a checkout
`pip install -r requirements.txt`. Nothing of the package is imported, so that
tools/install_detectron2.py of a checkout runs this file before anything is installed.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

GIT_URL = "https://github.com/facebookresearch/detectron2.git"
GIT_COMMIT = "02b5c4e295e990042a714712c21dc79b731e8833"
GIT_PROBE_SECONDS = 15

CARRIER = "labgym==3.1.2"
CARRIER_SHA256 = "a2900cff8a3fb508e1975f19b5f9abd9f261966db87b0c332697fb4138c1cb2b"
CARRIER_FOLDER = "LabGym/detectron2"
CARRIER_IMPORT = "LabGym.detectron2"

# What Detectron2 itself needs, lambda_det requires
SETUP = f"""\
from setuptools import find_namespace_packages, setup

setup(
    name="detectron2",
    version="0.6",
    description="Detectron2 0.6 by FAIR, its Python files out of {CARRIER}",
    url="https://github.com/facebookresearch/detectron2",
    author="FAIR",
    license="Apache-2.0",
    license_files=["LICENSE", "NOTICE"],
    packages=find_namespace_packages(include=["detectron2", "detectron2.*"]),
    package_data={{"detectron2": ["**/*"]}},
)
"""
NOTICE = f"""\
Detectron2, Copyright (c) Facebook, Inc. and its affiliates, licensed under the Apache License,
Version 2.0: https://github.com/facebookresearch/detectron2

These are the Python files of Detectron2 0.6 (the main branch of early 2023) out of the wheel
{CARRIER} on PyPI (SHA-256 {CARRIER_SHA256}).
That wheel has them under the import name {CARRIER_IMPORT}. lambda_det restored the name and
changed nothing else. The compiled extension detectron2._C is not included.
"""


class NotInstalled(Exception):
    """Detectron2 cannot be installed in one way; the text says why in one line."""


def last_line(output: str) -> str:
    """The line of pip's, git's or Python's output that names the failure."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line.lower() or line.startswith("fatal:")]
    return (telling or lines or ["no message"])[-1]


def run(command: list[str], **options) -> str:
    """Run a command and return its output; raise NotInstalled if it fails."""
    pipes = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        result = subprocess.run(command, **pipes, text=True, errors="replace", **options)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotInstalled(error) from None
    if result.returncode:
        raise NotInstalled(last_line(result.stdout))
    return result.stdout


def pip(command: str, *arguments: str) -> None:
    """Run a command of pip, or of uv in an environment without pip, for this Python."""
    if find_spec("pip"):
        unasked = ["--yes"] if command == "uninstall" else []  # uv never asks
        run([sys.executable, "-m", "pip", command, *unasked, *arguments])
    else:
        uv = os.environ.get("UV", "uv")  # `uv run` sets the variable
        run([uv, "pip", command, "--python", sys.executable, *arguments])


def python(code: str) -> str:
    """Run code in a new interpreter, which imports nothing from the current folder."""
    return run([sys.executable, "-P", "-c", code])


def check_dependencies() -> None:
    """Detectron2 is built and installed without its dependencies, so they must be there."""
    modules = "setuptools, omegaconf, hydra, cloudpickle, iopath, fvcore, PIL, pycocotools, torch"
    try:
        python(f"import {modules}")
    except NotInstalled as error:
        raise NotInstalled(
            f"{error}; first install what lambda_det requires: its wheel brings it, and in a "
            "checkout `pip install -r requirements.txt`"
        ) from None


def find_installed() -> str | None:
    """Version and place of a Detectron2 that can be imported; None where there is none.

    Raises:
        NotInstalled: there is one that cannot be imported.
    """
    try:
        output = python(
            "import detectron2 as d, detectron2.modeling; print(d.__version__, 'in', d.__path__[0])"
        )
    except NotInstalled as error:
        # A folder of that name on PYTHONPATH is no package
        if str(error).endswith(("'detectron2'", "named 'detectron2.modeling'")):
            return None
        raise NotInstalled(
            f"there is one that cannot be imported ({error}); repair it, or remove it with "
            "`pip uninstall detectron2` and run this again"
        ) from None
    return output.splitlines()[-1]


def install_package(source: str, *, compiled: bool) -> None:
    """Build and install from a folder or an address; remove the installation if it cannot be
    imported.
    """
    if compiled:
        print(
            f"Building Detectron2's C++ operators from {source} with the installed PyTorch: 1 to 2 "
            "minutes on 2 cores, longer if a CUDA compiler also builds them for GPUs.",
            flush=True,
        )
    pip("install", "--no-build-isolation", "--no-deps", source)
    try:
        if find_installed() is None:
            raise NotInstalled("it was installed where this Python does not look")
        if compiled:
            python("import torch, detectron2._C")
    except NotInstalled:
        pip("uninstall", "detectron2")
        raise


def from_git() -> None:
    """Build the pinned upstream commit."""
    # no question for a password, and no long wait if packets are lost
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    run(["git", "ls-remote", GIT_URL, "HEAD"], env=environment, timeout=GIT_PROBE_SECONDS)
    install_package(f"git+{GIT_URL}@{GIT_COMMIT}", compiled=True)


def from_folder(folder: Path) -> None:
    """Build a checkout of Detectron2's repository."""
    if not (folder / "detectron2" / "__init__.py").is_file():
        raise NotInstalled(
            f"{folder} is no checkout of Detectron2: it has no detectron2/__init__.py"
        )
    install_package(str(folder.resolve()), compiled=True)


def from_wheel() -> None:
    """Install the Python files out of the carrier's wheel on the package registry."""
    print(
        f"Downloading {CARRIER}, the package of another project, from the package registry, "
        "because Detectron2's Python files of early 2023 are in it; --source git rules that out. "
        "Its SHA-256 is checked. Only these files are installed, as detectron2 0.6; the rest is "
        "deleted, and nothing of it run.",
        flush=True,
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fetch_carrier(folder / "carrier")
        write_source(folder / "carrier", folder / "source")
        install_package(str(folder / "source"), compiled=False)


def fetch_carrier(folder: Path) -> None:
    """Unpack the carrier's wheel into ``folder``; pip checks the SHA-256."""
    folder.mkdir()
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{CARRIER} --hash=sha256:{CARRIER_SHA256}\n")
    # The wheel asks for a Python below 3.11, which Detectron2's files do not need.
    any_python = "--ignore-requires-python" if find_spec("pip") else "--python-version=3.10"  # uv's
    target = [f"--target={folder}", f"--requirement={requirement}"]
    pip("install", any_python, "--only-binary=:all:", "--no-deps", "--require-hashes", *target)


def write_source(carrier: Path, folder: Path) -> None:
    """Write a source tree of Detectron2 from an unpacked carrier."""
    compiled = shutil.ignore_patterns("__pycache__")
    shutil.copytree(carrier / CARRIER_FOLDER, folder / "detectron2", ignore=compiled)
    for path in folder.rglob("*"):
        if path.is_file():
            path.write_bytes(path.read_bytes().replace(CARRIER_IMPORT.encode(), b"detectron2"))
    (folder / "setup.py").write_text(SETUP)
    (folder / "NOTICE").write_text(NOTICE)
    (folder / "LICENSE").write_text(license_text())


def license_text() -> str:
    """The Apache licence, which both projects have: of this checkout, or of the installed wheel."""
    root = Path(__file__).resolve().parents[1]
    if (file := root / "LICENSE").is_file() and (root / "setup.py").is_file():
        return file.read_text("utf-8")
    files = importlib.metadata.files("lambda_det") or []
    return next(file.read_text("utf-8") for file in files if file.name == "LICENSE")


def install(source: str | None) -> bool:
    """Install Detectron2 from "git", "wheel", a folder, or with None from git or the wheel."""
    try:
        check_dependencies()
        found = find_installed()
    except NotInstalled as error:
        print(f"error: Detectron2 was not installed: {error}", file=sys.stderr)
        return False
    if found:
        print(
            f"Detectron2 {found} can be imported, so nothing is installed. "
            "To replace it, run `pip uninstall detectron2` first."
        )
        return True
    known = {"git": from_git, "wheel": from_wheel}
    for name in known if source in (None, "auto") else [source]:
        try:
            known[name]() if name in known else from_folder(Path(name))
        except NotInstalled as error:
            print(f"Detectron2 was not installed from {name}: {error}", flush=True)
        else:
            print(f"Detectron2 was installed from {name}.")
            return True
    print(
        "error: Detectron2 was not installed; the lines above say why. Run this again once GitHub "
        "or a package registry can be reached, or give a checkout: --source FOLDER.",
        file=sys.stderr,
    )
    return False


def add_source(parser: argparse.ArgumentParser) -> None:
    """Add the flag that says where Detectron2 comes from."""
    parser.add_argument(
        "--source",
        metavar="auto|git|wheel|FOLDER",
        help="git, or the wheel where git fails (auto, the default); one of them; or a folder with "
        "a checkout of Detectron2's repository",
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_source(parser)
    return 0 if install(parser.parse_args().source) else 2


if __name__ == "__main__":
    sys.exit(main())
