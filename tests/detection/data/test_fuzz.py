"""Broken data sets: each is used, or refused by an error that names what is wrong.

By default some tens of cases. With the marker ``fuzz`` and LAMBDA_DET_FUZZ=large there are three
hundred. ``python -m tests.detection.data.fuzz`` takes any number.
"""

from __future__ import annotations

import copy
import json
import logging
import math
import os
import random
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lambda_det.detection.data import build_train_loader, check_datasets, register_json_datasets
from lambda_det.errors import DataError

from . import fuzz_trial
from .fuzz_cases import (
    BROKEN_FILES,
    MUTATIONS,
    STRANGE_FILES,
    STRANGE_NAMES,
    Case,
    GroundTruth,
    ground_truth_name,
    maker,
)
from .fuzz_trial import Trial, config

pytestmark = pytest.mark.posix

# Cases of one test, without the marker and with it
SMALL, LARGE = 12, 50


@pytest.fixture(scope="module")
def trial(tmp_path_factory) -> Trial:
    folder = tmp_path_factory.mktemp("fuzz")
    return Trial(GroundTruth.made(folder), folder / "cases")


@pytest.mark.parametrize(
    ("kind", "seeds"),
    [
        *((kind, range(SMALL)) for kind in MUTATIONS),
        *(
            pytest.param(kind, range(first, first + LARGE), marks=pytest.mark.fuzz)
            for kind, count in (("structure", 100), ("bytes", 50), ("images", 50))
            for first in range(0, count, LARGE)
        ),
    ],
    ids=str,
)
def test_mutations_of_a_sound_data_set(trial, kind, seeds):
    outcomes = set()
    for seed in seeds:
        try:
            outcomes.add(trial.take(MUTATIONS[kind](trial.ground_truth, seed)))
        except AssertionError as error:
            pytest.fail(
                f"python -m tests.detection.data.fuzz 1 --seed {seed} --kind {kind}\n{error}"
            )
    # Neither do the mutations break all that they touch, nor are they too tame
    assert any("used" in outcome for outcome in outcomes) and len(outcomes) > 1


# Values as they should be, as they may be, and as no file should have them
_odd = st.sampled_from(
    [0, -1, 1e-9, 1e5, 1e9, 1e300, math.inf, -math.inf, math.nan, 2**31, 2**64, 10**400, True]
)
_coordinates = st.one_of(*[st.integers(0, 64)] * 4, *[st.floats(-70, 130)] * 2, st.floats(), _odd)
_names = st.text(max_size=6) | st.sampled_from(["left", "\ud800", "a\nb"])
_anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | _odd | _names,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(_names, inner, max_size=3),
    max_leaves=6,
)


def _mostly(right: st.SearchStrategy, share: int = 30) -> st.SearchStrategy:
    """What is right, and one time in ``share`` anything."""
    return st.integers(1, share).flatmap(lambda number: _anything if number == share else right)


_small = st.integers(0, 60)
_extent = st.integers(1, 30)
_boxes = st.tuples(_small, _small, _extent, _extent).map(list) | st.lists(
    _coordinates, min_size=4, max_size=4
)
_polygons = st.lists(st.lists(_coordinates, min_size=6, max_size=13), min_size=1, max_size=2)
_runs = st.fixed_dictionaries(
    {
        "size": st.sampled_from([[64, 64]] * 9 + [[64, 63], [2**31, 2**31], [0, 0]]),
        "counts": st.one_of(
            st.integers(0, 4096).map(lambda n: [n, 4096 - n]),
            st.lists(st.integers(0, 4096), max_size=4),
            st.lists(_odd, max_size=3),
            st.text(st.characters(min_codepoint=48, max_codepoint=111), max_size=12),
            st.text(max_size=6),
        ),
    }
)
_keypoints = st.lists(st.integers(0, 64), min_size=12, max_size=12) | st.lists(_coordinates)


def _annotations(images: list[int]) -> st.SearchStrategy:
    return st.fixed_dictionaries(
        {
            "image_id": _mostly(st.sampled_from(images), 100),
            "category_id": _mostly(st.sampled_from([1, 5]), 100),
            "bbox": _mostly(_boxes),
        },
        optional={
            "segmentation": _mostly(_polygons | _runs),
            "area": _mostly(_coordinates),
            "iscrowd": _mostly(st.sampled_from([0, 0, 0, 1]), 60),
            "keypoints": _mostly(_keypoints),
            "num_keypoints": _mostly(st.integers(0, 4)),
            "ignore": _mostly(st.just(0)),
        },
    )


@st.composite
def coco(draw: st.DrawFn) -> tuple[bytes, dict[str, Any]]:
    """An annotation file of the images of ``GroundTruth.made``, and switches."""
    ids = draw(st.lists(st.integers(-2, 10), min_size=1, max_size=4, unique=True))
    content = {
        "images": [
            {"id": i, "file_name": f"{n:06d}.png", "width": 64, "height": 64}
            for n, i in enumerate(ids)
        ],
        "annotations": draw(st.lists(_annotations(ids), min_size=1, max_size=6)),
        "categories": [
            {"id": 5, "name": draw(_mostly(_names)), "keypoints": ["left", "right", "a", "b"]},
            {"id": 1, "name": "one"},
        ],
    }
    for number, entry in enumerate(content["annotations"]):
        entry["id"] = number
    # One bad box in a hundred is borne, so that others come as far as the loader
    entry = draw(st.sampled_from(content["annotations"]))
    if draw(st.booleans()):
        sound = {"image_id": ids[0], "category_id": 1, "bbox": [2, 2, 9, 9], "area": 81}
        sound["segmentation"] = [[2, 2, 11, 2, 11, 11]]
        content["annotations"] = [
            entry, *({**sound, "id": 1000 + n} for n in range(100))
        ]  # fmt: skip
    for _ in range(draw(st.sampled_from([0] * 9 + [1]))):
        place = draw(st.sampled_from([content, *content["images"], *content["categories"]]))
        place[draw(st.sampled_from(sorted(place)))] = draw(_anything)
    switches = st.fixed_dictionaries(
        {
            "mask_on": st.sampled_from([True] * 4 + [False]),
            "keypoint_on": st.sampled_from([False] * 3 + [True]),
            "large_scale_jitter": st.booleans(),
            "mask_format": st.sampled_from(["polygon", "bitmask"]),
            "with_step": st.sampled_from([False] * 11 + [True]),
        }
    )
    return json.dumps(content).encode(), draw(switches)


@pytest.mark.parametrize("part", [0, pytest.param(1, marks=pytest.mark.fuzz)])
def test_files_that_hypothesis_makes(trial, part):
    @given(coco(), st.just(part))  # another part is another test to Hypothesis
    def take(made: tuple[bytes, dict[str, Any]], _: int) -> None:
        content, switches = made
        cases.add((content, *switches.values()))
        outcomes.add(trial.take(Case(content, **switches)))

    outcomes: set[str] = set()
    cases: set[tuple] = set()
    take()
    examples = settings().max_examples
    assert len(cases) > examples / 2  # Hypothesis repeats itself
    if examples > 50:
        assert any("used" in outcome for outcome in outcomes) and len(outcomes) > 1


@pytest.mark.parametrize(
    "content",
    [
        *(b"", b"\xff\xfe", b"null", b"[]", b"{}", b"NaN", b"9" * 10**5),
        *(b"[" * 10**6, b'{"a":' * 10**6),
        *(b'\xef\xbb\xbf{"images": []}', b'{"images": [], "annotations": [], "categories": []}'),
    ],
    ids=lambda content: repr(content[:12]),
)
def test_files_that_are_not_in_cocos_format(trial, content):
    assert trial.take(Case(content)) == "DataError"


@pytest.mark.parametrize("kind", [*BROKEN_FILES, *STRANGE_FILES])
def test_each_kind_of_broken_image_alone(trial, kind):
    """A missing file is refused at the start; a broken one is skipped in training only."""
    if kind == "forbidden" and os.geteuid() == 0:
        pytest.skip("root may read all")
    content = copy.deepcopy(trial.ground_truth.content)
    entry = content["images"][2]
    good = (trial.ground_truth.folder / entry["file_name"]).read_bytes()
    images = {entry["file_name"]: maker(kind, good, random.Random(0))}
    case = Case(json.dumps(content).encode(), images, with_step=True)
    outcome = trial.take(case)
    if kind in ("mode", "flipped", "zeroed"):
        assert "used" in outcome  # what the bytes say may still be a picture
    elif kind in BROKEN_FILES or kind == "forbidden":
        assert outcome == "DataError and used"
    else:
        assert outcome == "DataError"


@pytest.mark.parametrize("name", STRANGE_NAMES, ids=ascii)
@pytest.mark.parametrize("there", [True, False])
def test_each_strange_name_of_an_image(trial, name, there):
    content = copy.deepcopy(trial.ground_truth.content)
    entry = content["images"][2]
    good = (
        trial.ground_truth.folder / ground_truth_name(trial.ground_truth, entry["id"])
    ).read_bytes()
    entry["file_name"] = name
    images = {name: lambda path: path.write_bytes(good)} if there else {"other": lambda path: None}
    trial.take(Case(json.dumps(content).encode(), images))


@pytest.mark.parametrize("workers", [0, pytest.param(3, marks=pytest.mark.slow)])
def test_images_are_skipped_up_to_the_limit_and_each_is_named(trial, tmp_path, workers):
    """Any worker may meet each of the four; workers share the count."""
    folder = tmp_path / "images"
    folder.mkdir()
    names = [image["file_name"] for image in trial.ground_truth.content["images"]]
    for number, name in enumerate(names):
        content = (trial.ground_truth.folder / name).read_bytes()
        (folder / name).write_bytes(content if number < 2 else content[: len(content) // 2])
    json_file = tmp_path / "set.json"
    json_file.write_text(json.dumps(trial.ground_truth.content))
    cfg = config(Case(b""), json_file, folder)
    cfg.DATALOADER.NUM_WORKERS = workers
    cfg.DATALOADER.FILTER_EMPTY_ANNOTATIONS = False
    register_json_datasets(cfg)
    check_datasets(cfg, train=True, test=False)
    for limit in (4, 3):
        log = tmp_path / f"log{limit}.txt"
        handler = logging.FileHandler(log, mode="a")
        logging.getLogger("lambda_det").addHandler(handler)
        cfg.DATALOADER.MAX_UNREADABLE_IMAGES = limit
        loader = build_train_loader(cfg, 2)
        loader.begin(seed=0, batches=0)
        batches = iter(loader)
        if limit == 4:
            for _ in range(12):
                assert len(next(batches)) == 2
            text = log.read_text()
            assert all(name in text for name in names[2:])
            assert not any(name in text for name in names[:2])
        else:
            with pytest.raises(DataError, match=r"4 unreadable .*MAX_UNREADABLE_IMAGES is 3"):
                for _ in range(12):
                    next(batches)
        logging.getLogger("lambda_det").removeHandler(handler)
        handler.close()


def test_a_case_that_waits_is_ended(tmp_path, monkeypatch):
    """Opening a pipe waits for a writer."""
    monkeypatch.setattr(fuzz_trial, "WAITING", 0.5)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(fuzz_trial.Hang), fuzz_trial.limits():
        (tmp_path / "pipe").read_bytes()


def test_a_case_that_computes_for_ever_is_ended_and_one_that_only_waits_is_not(monkeypatch):
    monkeypatch.setattr(fuzz_trial, "COMPUTING", 2)
    with fuzz_trial.limits():
        time.sleep(0.5)
    with pytest.raises(fuzz_trial.Hang), fuzz_trial.limits():
        while True:
            pass
