"""No message or page names a package that somebody else could register.

A name that the registry does not have is free for anybody, and whoever follows a message would run
what is there. Requirements are installed with every environment, which says what is not there.
"""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lambda_det.detection.registry import EVALUATORS
from lambda_det.export import onnx_file

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[1]
# Looked up with `pip index versions NAME` on 26 to 28 November 2026. lambda-det, detectron2 and
# panopticapi were not there.
_NAMES = """
build cityscapesscripts cuda-bindings fastapi ipykernel jupyterlab lvis mkdocs mkdocs-material
mkdocstrings mkdocstrings-python mypy nbclient numpy onnx onnxruntime onnxscript prometheus-client
pycocotools ruff setuptools timm torch torchvision twine uvicorn wheel
"""
REGISTERED = set(_NAMES.split())
FOLDERS = ("lambda_det", "tools", "configs", "datasets", "docs", "projects", ".ci", ".github")
SUFFIXES = (".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".html", ".sh", "")
COMMAND = re.compile(r"\bpip3?[\"',\s]+(?:install|wheel|download)\b|\bpipx run\b")
# Options that take a value, which is no package
VALUED = ("--target", "--index-url", "--extra-index-url", "--find-links", "--python", "--wheel-dir")
VALUED += ("-r", "--requirement", "-e", "--editable", "-c", "--constraint", "-d", "-i")


def named(text: str) -> Iterator[str]:
    """The packages that the commands in a line install, as they are written there."""
    for command in COMMAND.finditer(text):
        rest = re.sub(r"\$\([^)]*\)", "", text[command.end() :])
        rest = re.split(r"[`;|#)]|&&|, |\.\s|\.$|: | \(", rest)[0]
        words = iter(re.findall(r"\{[^}]*\}|[^\s\"']+", rest))
        for word in words:
            if word in VALUED:
                next(words, None)
            elif re.match(r"\w", word) and not {"/", "\\", "("} & {*word}:
                yield word


def bare(name: str) -> str:
    """Without extras, version and marker, as registries compare names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~;\s]", name.strip())[0]).lower()


def test_every_package_that_is_to_be_installed_is_registered():
    names: dict[str, set[str]] = {
        "tables": {evaluator.package for evaluator in EVALUATORS.values()} - {""},
        "exports": {*onnx_file.PACKAGES},
    }
    found = [file for folder in FOLDERS for file in ROOT.glob(f"{folder}/**/*")]
    for file in [*found, *ROOT.glob("*")]:
        place = file.relative_to(ROOT)
        if file.is_file() and file.suffix in SUFFIXES and "tests" not in place.parts:
            lines = file.read_text("utf-8").replace("\\\n", " ").splitlines()
            names[str(place)] = {bare(x) for line in lines for x in named(line)}
    assert len(set().union(*names.values())) > 10  # the commands are found
    wrong = {file: found - REGISTERED for file, found in names.items()}
    assert not {file: found for file, found in wrong.items() if found}
