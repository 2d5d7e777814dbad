"""Broken data sets: each is used, or refused by an error that names what is wrong."""

import copy
import json
import os
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.detection.data.fuzz import (
    BROKEN_FILES,
    MUTATIONS,
    STRANGE_FILES,
    STRANGE_NAMES,
    Case,
    GroundTruth,
    maker,
    take,
)

pytestmark = pytest.mark.posix


@pytest.fixture(scope="module")
def ground_truth(tmp_path_factory) -> GroundTruth:
    """Of generated shapes, or of the real COCO where it is."""
    if root := os.environ.get("LAMBDA_DET_COCO"):
        coco = Path(root, "coco")
        return GroundTruth.read(coco / "annotations/instances_val2017.json", coco / "val2017")
    return GroundTruth.made(tmp_path_factory.mktemp("fuzz"))


@pytest.mark.slow
@pytest.mark.fuzz
def test_mutations_of_a_sound_data_set(ground_truth):
    outcomes = set()

    @settings(max_examples=max(24, 2 * settings().max_examples))
    @given(kind=st.sampled_from(sorted(MUTATIONS)), seed=st.integers(0, 2**32))
    def each(kind, seed):
        outcomes.add(take(MUTATIONS[kind](ground_truth, random.Random(seed)), ground_truth))

    each()
    # Neither do the mutations break all that they touch, nor are they too tame
    assert any("used" in outcome for outcome in outcomes) and len(outcomes) > 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*BROKEN_FILES, *STRANGE_FILES])
def test_each_kind_of_broken_image_alone(ground_truth, kind):
    """A missing file is refused at the start; a broken one is skipped in training only."""
    if kind == "forbidden" and os.geteuid() == 0:
        pytest.skip("root may read all")
    content = copy.deepcopy(ground_truth.content)
    entry = content["images"][2]
    good = (ground_truth.folder / entry["file_name"]).read_bytes()
    images = {entry["file_name"]: maker(kind, good, random.Random(0))}
    case = Case(json.dumps(content).encode(), images, with_step=True)
    outcome = take(case, ground_truth)
    if kind in ("mode", "flipped"):
        assert "used" in outcome  # what the bytes say may still be an image
    elif kind in BROKEN_FILES or kind == "forbidden":
        assert outcome == "DataError and used"
    else:
        assert outcome == "DataError"


@pytest.mark.slow
@pytest.mark.parametrize("name", STRANGE_NAMES, ids=ascii)
@pytest.mark.parametrize("there", [True, False])
def test_each_strange_name_of_an_image(ground_truth, name, there):
    content = copy.deepcopy(ground_truth.content)
    entry = content["images"][2]
    good = (ground_truth.folder / entry["file_name"]).read_bytes()
    entry["file_name"] = name
    images = {name if there else "other": lambda path: path.write_bytes(good)}
    take(Case(json.dumps(content).encode(), images), ground_truth)
