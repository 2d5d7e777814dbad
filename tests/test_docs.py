"""The pages name files, sections, modules and configuration keys that exist."""

import functools
import pkgutil
import re
from collections import Counter
from pathlib import Path

import pytest
from detectron2.config import CfgNode, get_cfg

from lambda_det import get_config
from lambda_det.classification.config import get_classification_config
from lambda_det.config import add_lambda_config, leaves
from tests.tool import load_tool

pytestmark = pytest.mark.checkout

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    *ROOT.glob("*.md"),
    *(
        page
        for room in ("datasets", "docs", "projects")
        for page in sorted(ROOT.glob(f"{room}/**/*.md"))
    ),
]
FILE = re.compile(
    r"(?<![\w/])(?:lambda_det|tests|tools|projects|configs|datasets|docs|\.ci)"
    r"(?:/[\w.]+)*/\w+\.(?:py|md|yaml|cpp)\b"
)
MODULE = re.compile(r"\b(?:lambda_det|tests)(?:\.\w+)+\b")
KEY = re.compile(r"\b(?:MODEL|DATA|DATASETS|DATALOADER|INPUT|SOLVER|TEST)(?:\.[A-Z0-9_]+)+\b")
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)]+))?\)")
PLACEHOLDER = re.compile(r"[A-Z]{2,}\w*\.(?:py|yaml)$")  # configs/RECIPE.yaml
# Names that are free on PyPI, where anybody may register what an installation would then run
UNREGISTERED = {"lambda-det", "lambda_det", "detectron2", "panopticapi"}
INSTALLED = re.compile(r"\bpip3? install ([^`;|&#\n]*)")
DEEPLAB_KEYS = {"MODEL.RESNETS.RES4_DILATION", "MODEL.RESNETS.RES5_MULTI_GRID"}


def _sections(page: Path) -> set[str]:
    """The anchors that GitHub makes of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text("utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def _keys(cfg: CfgNode) -> set[str]:
    """All keys, and the sections they are in."""
    names = [key.split(".") for key, _ in leaves(cfg)]
    return {".".join(parts[:end]) for parts in names for end in range(1, len(parts) + 1)}


def _keys_of_project(page: Path) -> set[str]:
    """The keys that the project of a page adds to a configuration, found in its sources."""
    project = ROOT.joinpath(*page.relative_to(ROOT).parts[:2])
    if project.parent.name != "projects":
        return set()
    sources = "".join(file.read_text("utf-8") for file in project.rglob("*.py"))
    return set(re.findall(r"\bcfg\.([A-Z0-9_.]+) = ", sources))


def _exists(name: str) -> bool:
    """Whether it is a module, or a name in one."""
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@functools.cache
def all_keys() -> set[str]:
    cfg = get_cfg()
    add_lambda_config(cfg)
    return _keys(cfg) | _keys(get_classification_config()) | DEEPLAB_KEYS


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_page_names_exists(page):
    text = page.read_text("utf-8")
    named = {name for name in FILE.findall(text) if not PLACEHOLDER.search(name)}
    assert not [name for name in named if not (ROOT / name).is_file()]
    assert not set(KEY.findall(text)) - all_keys() - _keys_of_project(page)
    assert not [name for name in MODULE.findall(text) if not _exists(name)]
    for target, section in LINK.findall(text):
        if not target.startswith("http"):
            linked = page.parent / target if target else page
            assert linked.exists(), target
            assert not section or section in _sections(linked), f"{target}#{section}"


def test_nobody_is_told_to_install_a_name_that_is_not_registered():
    for file in [*PAGES, *ROOT.glob("lambda_det/**/*.py"), ROOT / "Dockerfile"]:
        words = " ".join(INSTALLED.findall(file.read_text("utf-8"))).split()
        assert not UNREGISTERED & {
            re.split(r"[\[<>=]", word.strip("\"'.,)"))[0] for word in words
        }, file


def test_the_readme_is_one_page_with_its_two_commands():
    text = (ROOT / "README.md").read_text("utf-8")
    assert len(text.splitlines()) <= 110
    assert re.search(r"^    make demo\b", text, re.M) and re.search(r"^    make test\b", text, re.M)


def test_the_program_without_our_package_joins_tiles_as_the_package_does():
    script = load_tool("detect", ".ci")
    assert script.PROGRAM.read_text("utf-8") == script.program(), "write it with .ci/detect.py"


def test_the_page_of_keys_has_what_the_code_has():
    script = load_tool("keys", ".ci")
    page = (ROOT / "docs" / "keys.md").read_text("utf-8")
    assert page == script.page(), "write it anew with .ci/keys.py"
    plain, ours = get_cfg(), get_cfg()
    add_lambda_config(ours)
    added = {key for key, _ in leaves(ours)} - {key for key, _ in leaves(plain)}
    recipes = {key for key, _ in leaves(get_classification_config()) if "LAMBDA" not in key}
    rows = re.findall(r"^- `([\w.]+)` \(`.+?`\): (.*)$", page, re.M)
    settings = {f"train.{name}" for name in get_config("common/train.py").train}
    # a key of two sections has a row in each
    assert Counter([*added, *recipes, *settings]) <= Counter(key for key, _ in rows)
    assert [key for key, sentence in rows if len(sentence) < 10] == []
