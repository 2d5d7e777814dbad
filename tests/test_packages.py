"""No message, page or requirement names a package that somebody else could register.

A name that the registry does not have is free for anybody, and whoever follows a message would run
what is there.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from lambda_det.detection.registry import EVALUATORS
from lambda_det.export.formats import FORMATS

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[1]
# Looked up with `pip index versions NAME` on 26 to 28 November 2026. lambda-det, detectron2 and
# panopticapi were not there.
_NAMES = """
black build check-jsonschema cityscapesscripts cloudpickle cuda-bindings fastapi filelock fvcore
httpx huggingface-hub hydra-core hypothesis iopath lambda-networks lvis matplotlib mkdocs
mkdocs-material mkdocstrings mkdocstrings-python mlflow mypy numpy omegaconf onnx onnxruntime
onnxscript openvino opencv-contrib-python opencv-python opencv-python-headless packaging pillow
prometheus-client pycocotools pytest pytest-xdist pyyaml ruff safetensors scipy setuptools
shapely simplejpeg tabulate tensorboard termcolor timm torch torchvision tqdm twine uvicorn
wandb wheel yacs
"""
REGISTERED = set(_NAMES.split())
FOLDERS = (
    "lambda_det",
    "tools",
    "configs",
    "datasets",
    "docs",
    "projects",
    "tests",
    ".ci",
    ".github",
)
SUFFIXES = (".py", ".md", ".yaml", ".yml", ".toml", ".txt", ".html", ".sh", "")
# What follows `pip install` in messages that are made as the program runs: an address, a file, or
# names of a table
EVALUATION = {evaluator.package for evaluator in EVALUATORS.values()} - {""}
EXPORT = {name for form in FORMATS.values() for name in form.packages}
MADE = {
    "UPSTREAM": set(),
    "package": EVALUATION,
    "flags": set(),
    "name": {"wandb", "mlflow"},
    "join_missing": EXPORT,
    "join_PACKAGES": {"fastapi", "uvicorn", "prometheus_client"},
    "peer": {"timm", "lambda-networks"},
    "runtime": {"onnxruntime", "openvino"},
}
COMMAND = re.compile(r"\bpip3?[\"',\s]+(?:install|wheel|download)\b|\bpipx run\b")
# Options that take a value, which is no package
VALUED = ("--target", "--index-url", "--extra-index-url", "--find-links", "--python", "--wheel-dir")
VALUED += ("-r", "--requirement", "-e", "--editable", "-c", "--constraint", "-d", "-i")


def texts(file: Path) -> Iterator[str]:
    """The lines of a file; of Python its strings, each as it is when it is whole."""
    content = file.read_text("utf-8")
    if file.suffix != ".py":
        yield from content.replace("\\\n", " ").splitlines()
        return
    inner = set()
    for node in ast.walk(ast.parse(content)):
        if isinstance(node, ast.JoinedStr):
            inner.update(map(id, node.values))
            yield from "".join(
                part.value if isinstance(part, ast.Constant) else _placeholder(part)
                for part in node.values
            ).splitlines()
        elif (
            isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner
        ):
            yield from node.value.splitlines()


def _placeholder(part: ast.FormattedValue) -> str:
    """The words of an expression, such as {join_names} for {", ".join(names)}."""
    return "{" + re.sub(r"\W+", "_", ast.unparse(part.value)).strip("_") + "}"


def named(text: str) -> Iterator[str]:
    """The packages that the commands in a text install, as they are written there."""
    for command in COMMAND.finditer(text):
        rest = re.split(
            r"[`;|#)]|&&|, |\.\s|\.$|: | \(", re.sub(r"\$\([^)]*\)", "", text[command.end() :])
        )[0]
        words = iter(re.findall(r"\{[^}]*\}|[^\s\"']+", rest))
        for word in words:
            if word in VALUED:
                next(words, None)
            elif not word.startswith(("-", "$", ".", "/", "<")) and "/" not in word:
                yield word


def bare(name: str) -> str:
    """Without extras, version and marker, as registries compare names."""
    return re.sub(r"[-_.]+", "-", re.split(r"[\[<>=!~;\s]", name.strip())[0]).lower()


def files() -> list[Path]:
    found = [file for folder in FOLDERS for file in ROOT.glob(f"{folder}/**/*")]
    found += ROOT.glob("*")
    return [
        file
        for file in found
        if file.is_file() and file.suffix in SUFFIXES and file != Path(__file__).resolve()
    ]


@pytest.mark.slow
def test_every_package_that_is_to_be_installed_is_registered():
    names: dict[str, set[str]] = {}
    for file in files():
        for text in texts(file):
            for name in named(text):
                here = MADE[name[1:-1]] if name.startswith("{") else {name}
                names.setdefault(str(file.relative_to(ROOT)), set()).update(map(bare, here))
    assert len(set().union(*names.values())) > 15  # the commands are found
    wrong = {file: found - REGISTERED for file, found in names.items()}
    assert not {file: found for file, found in wrong.items() if found}


def test_every_requirement_is_registered():
    lines = [*(ROOT / "requirements.txt").read_text("utf-8").splitlines()]
    for node in ast.walk(ast.parse((ROOT / "setup.py").read_text("utf-8"))):
        if isinstance(node, ast.keyword) and node.arg in ("install_requires", "extras_require"):
            lines += (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant))
    lines += re.findall(r'"([^"]+)"', re.search(r"requires = (\[.*\])", _pyproject())[1])
    found = {bare(line) for line in lines if line.strip() and not line.startswith("#")}
    extras = {"fast", "onnx", "docs", "pretraining"}
    assert len(found) > 30 and found - extras <= REGISTERED


def _pyproject() -> str:
    return (ROOT / "pyproject.toml").read_text("utf-8")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("run `pip install -U a-b c_d>=1` and go on", ["a-b", "c_d>=1"]),
        ("pip install --target x one, then two", ["one"]),
        ("x is missing: pip install {package}{flags}.", ["{package}", "{flags}"]),
        ("pip uninstall -y a; pip install --force-reinstall b", ["b"]),
        ("pip install . && pip install git+https://x/y -r requirements.txt", []),
        ('uv pip install --index-url https://x "a[b]"', ["a[b]"]),
    ],
)
def test_commands_are_found(text, names):
    assert list(named(text)) == names
