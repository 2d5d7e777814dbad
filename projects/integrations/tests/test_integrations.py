"""The examples of the README, executed in the folder in which docs/own_data.md ran."""

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests import forked
from tests.test_pages import own_data  # noqa: F401

pytestmark = pytest.mark.slow  # trains

ROOT = Path(__file__).resolve().parents[3]
PAGE = (Path(__file__).parents[1] / "README.md").read_text("utf-8")
COMMANDS = re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
INTEGRATIONS = {
    "supervision": "supervision",
    "fiftyone": "FiftyOne",
    "sahi": "SAHI",
    "tidecv": "TIDE",
}


def _run(folder: Path, script: str, *words: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, script, *words],
        cwd=folder,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, f"{script}\n{done.stdout[-3000:]}{done.stderr[-3000:]}"


def _has_database() -> bool:
    check = "import fiftyone; fiftyone.list_datasets()"
    return subprocess.run([sys.executable, "-c", check], capture_output=True).returncode == 0


@pytest.mark.parametrize("module", INTEGRATIONS)
def test_a_neighbour_takes_the_predictions(module: str, request):
    if importlib.util.find_spec(module) is None:
        pytest.skip(f"{module} is not installed")
    if module == "fiftyone" and not _has_database():
        pytest.skip("FiftyOne has no MongoDB here")
    (script,) = [
        text for text in EXAMPLES if f"import {module}" in text or f"from {module}" in text
    ]
    folder = request.getfixturevalue("own_data")
    (folder / f"with_{module}.py").write_text(script, "utf-8")
    _run(folder, f"with_{module}.py")
    if module == "supervision":
        assert (folder / "supervision.png").is_file()


def test_a_network_of_timm_is_trained(tmp_path):
    """A smaller one, with random weights, for two steps on the images of the page."""
    (script,) = [text for text in EXAMPLES if "import timm" in text]
    assert '"convnext_tiny", pretrained=True' in script
    (tmp_path / "with_timm.py").write_text(
        script.replace('"convnext_tiny", pretrained=True', '"convnext_atto", pretrained=False')
    )
    shapes = ["--root", "my", "--num-train", "4", "--num-val", "2"]
    _forked([str(ROOT / "datasets" / "make_shapes.py"), *shapes], tmp_path)
    ((program, *words),) = [shlex.split(command.replace("\\\n", "")) for command in COMMANDS]
    assert program == "python"
    sizes = ["INPUT.MIN_SIZE_TRAIN", "(64,)", "INPUT.MIN_SIZE_TEST", "64", "SOLVER.MAX_ITER", "2"]
    sizes += ["TEST.DETECTIONS_PER_IMAGE", "4", "MODEL.RPN.POST_NMS_TOPK_TRAIN", "50"]
    _forked([*words, *sizes, "SOLVER.IMS_PER_BATCH", "2", "MODEL.DEVICE", "cpu"], tmp_path)
    assert (tmp_path / "output" / "timm" / "model_final.pth").is_file()


def _forked(words: list[str], folder: Path) -> None:
    done = forked.run(words, folder / "printed", cwd=folder, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, done.stdout[-3000:]


def test_each_neighbour_has_its_section():
    assert re.findall(r"^## (.*)$", PAGE, re.MULTILINE) == [*INTEGRATIONS.values(), "timm"]
    assert len(EXAMPLES) == len(INTEGRATIONS) + 1
