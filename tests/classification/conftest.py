"""Runs of a tiny recipe on tiny images."""

import pytest

from lambda_det.classification import load_recipe, parser
from tests.classification.tiny import NETWORK, RECIPE, make_images
from tests.training.toy import let_logs_reach_pytest


@pytest.fixture(autouse=True)
def logs_reach_pytest(monkeypatch):
    let_logs_reach_pytest(monkeypatch)


@pytest.fixture(scope="session")
def images(tmp_path_factory):
    """The folder that holds train and val."""
    root = tmp_path_factory.mktemp("pictures")
    make_images(root)
    return root


@pytest.fixture
def arguments(images, tmp_path):
    """Makes the parsed command line of a run in tmp_path/run, of flags and KEY VALUE pairs."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE)

    def make(*words):
        flags = [word for word in words if str(word).startswith("--")]
        pairs = [str(word) for word in words if not str(word).startswith("--")]
        where = ["DATA.TRAIN", images / "train", "DATA.VAL", images / "val"]
        where += ["OUTPUT_DIR", tmp_path / "run"]
        words = [*flags, *map(str, where), *NETWORK, *pairs]
        return parser().parse_args(["--config-file", str(recipe), *words])

    return make


@pytest.fixture
def recipe(arguments):
    """The configuration of such a command line."""
    return lambda *words: load_recipe(arguments(*words))
