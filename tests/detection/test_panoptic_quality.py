"""Panoptic quality, against a slow count over pairs of masks; and files that are broken."""

import json
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from detectron2.data import MetadataCatalog
from PIL import Image

from lambda_det.detection.data.checks import check_panoptic
from lambda_det.detection.panoptic_quality import Matches, PanopticQualityEvaluator, match_segments
from lambda_det.errors import DataError


def _slow(truth, truth_segments, predicted, predicted_segments):
    """Section 4 of the paper, computed for each pair of boolean masks."""
    known = [s for s in truth_segments if (truth == s["id"]).any()]
    void = ~np.isin(truth, [s["id"] for s in known])
    counts = {}
    for category in {s["category_id"] for s in (*truth_segments, *predicted_segments)}:
        of_category = [s for s in known if s["category_id"] == category]
        crowd = void | np.isin(truth, [s["id"] for s in of_category if s["iscrowd"]])
        objects = [truth == s["id"] for s in of_category if not s["iscrowd"]]
        found = [predicted == s["id"] for s in predicted_segments if s["category_id"] == category]
        found = [mask for mask in found if mask.any()]
        ious = np.zeros((len(objects), len(found)))
        for i, mask in enumerate(objects):
            for j, other in enumerate(found):
                ious[i, j] = (mask & other).sum() / (mask | (other & ~void)).sum()
        right = ious > 0.5
        forgiven = [(mask & crowd).sum() / mask.sum() > 0.5 for mask in found]
        fp = sum(not any(pair) for pair in zip(forgiven, right.any(0), strict=True))
        counts[category] = (right.sum(), ious[right].sum(), fp, (~right.any(1)).sum())
    return counts


def _blocks(rng, count):
    """Segment ids on a coarse grid, enlarged, 0 for void."""
    coarse = rng.integers(0, count + 1, (4, 5))
    return np.kron(coarse, np.ones((3, 3), dtype=int))


@pytest.mark.parametrize("seed", range(40))
def test_it_counts_as_a_slow_reference(seed):
    rng = np.random.default_rng(seed)
    truth = _blocks(rng, 5)
    predicted = np.where(rng.random(truth.shape) < 0.8, truth, _blocks(rng, 7))
    truth_segments = [
        {"id": i, "category_id": int(rng.integers(1, 4)), "iscrowd": int(rng.random() < 0.2)}
        for i in range(1, 6)
    ]
    kinds = [s["category_id"] if rng.random() < 0.8 else 1 for s in truth_segments]
    kinds += rng.integers(1, 4, 2).tolist()
    predicted_segments = [{"id": i, "category_id": kind} for i, kind in enumerate(kinds, 1)]
    found = defaultdict(Matches)
    match_segments(truth, truth_segments, predicted, predicted_segments, found)
    expected = _slow(truth, truth_segments, predicted, predicted_segments)
    for category, counts in expected.items():
        m = found[category]
        result = (m.matched, m.iou, m.unmatched_predictions, m.unmatched_ground_truths)
        assert result == pytest.approx(counts)
        matched, iou, *unmatched = counts
        if matched:
            f1 = matched / (matched + sum(unmatched) / 2)
            assert m.quality() == pytest.approx((iou / matched * f1, iou / matched, f1))


@pytest.fixture
def data(tmp_path):
    """One image of 2x4: a thing, category 7, over the left half, and stuff, category 300."""
    ids = np.array([[260, 260, 3, 3]] * 2)
    colours = np.stack([ids % 256, ids // 256, 0 * ids], axis=-1).astype(np.uint8)
    Image.fromarray(colours).save(tmp_path / "1.png")
    segments = [{"id": 260, "category_id": 7}, {"id": 3, "category_id": 300}]
    content = {
        "categories": [{"id": i, "isthing": int(i == 7)} for i in (7, 300, 9)],
        "annotations": [{"image_id": 1, "file_name": "1.png", "segments_info": segments}],
    }
    (tmp_path / "panoptic.json").write_text(json.dumps(content))
    MetadataCatalog.get("one_panoptic").set(
        panoptic_root=str(tmp_path),
        panoptic_json=str(tmp_path / "panoptic.json"),
        thing_dataset_id_to_contiguous_id={7: 0},
        stuff_dataset_id_to_contiguous_id={300: 0, 9: 1},
    )
    yield "one_panoptic"
    MetadataCatalog.remove("one_panoptic")


@pytest.mark.parametrize(
    ("predicted", "segments", "expected"),
    [
        ([1, 1, 2, 2], [(1, True, 0), (2, False, 0)], (100, 100, 100)),
        ([1, 1, 2, 2], [(1, True, 0), (2, False, 1)], (100 / 3, 100, 0)),  # 300 and 9 are wrong
        ([1, 1, 1, 2], [(1, True, 0), (2, False, 0)], (100 / 3, 200 / 3, 0)),
        ([0, 0, 0, 0], [], (0, 0, 0)),
    ],
)
def test_the_evaluator(data, predicted, segments, expected):
    evaluator = PanopticQualityEvaluator(data)
    segments = [{"id": i, "isthing": t, "category_id": c} for i, t, c in segments]
    output = {"panoptic_seg": (torch.tensor([predicted] * 2), segments)}
    for _ in range(2):  # a second round starts anew
        evaluator.reset()
        evaluator.process([{"image_id": 1}], [output])
        result = evaluator.evaluate()["panoptic_seg"]
        assert [result[key] for key in ("PQ", "PQ_th", "PQ_st")] == pytest.approx(expected)
    with pytest.raises(DataError, match=r"image 7"):
        evaluator.process([{"image_id": 7}], [output])


def _of_mode(mode: str) -> Callable[[Path], None]:
    return lambda file: Image.open(file).convert(mode).save(file)


def _change(folder: Path, value: Any, *place: str | int) -> None:
    """Set an entry of the annotation of a panoptic file."""
    file = folder / "panoptic.json"
    content = json.loads(file.read_text())
    node = content["annotations"][0]
    for key in place[:-1]:
        node = node[key]
    node[place[-1]] = value
    file.write_text(json.dumps(content))


def _described(*ids: int) -> Callable[[Path], None]:
    """Pixels without a description are void; nobody has to find a segment without pixels."""
    segments = [{"id": i, "category_id": 300} for i in ids]
    return lambda file: _change(file.parent, segments, "segments_info")


@pytest.mark.parametrize(
    ("damage", "named"),
    [
        (_described(260, 3), None),
        (_described(260), r"\b3\b"),
        (_described(260, 3, 5), r"\b5\b"),
        (_described(260, 3, 0), r"\b0\b"),
        (lambda file: file.write_bytes(file.read_bytes()[:50]), ""),
        (lambda file: Image.open(file).crop((0, 0, 3, 2)).save(file), r"\(2, 3\)"),
        # Of another mode, all segments would be void, and a prediction without any would be right
        (_of_mode("L"), "L"),
        (_of_mode("P"), "P"),
        (lambda file: Image.fromarray(np.full((2, 4), 260, np.uint16)).save(file), "I;16"),
        (_of_mode("RGBA"), None),
    ],
)
def test_a_broken_image_of_segments(data, tmp_path, damage, named):
    damage(tmp_path / "1.png")
    output = {"panoptic_seg": (torch.zeros(2, 4, dtype=torch.int32), [])}
    evaluator = PanopticQualityEvaluator(data)
    if named is None:
        evaluator.process([{"image_id": 1}], [output])
        assert evaluator.evaluate()["panoptic_seg"]["PQ"] == 0
        return
    with pytest.raises(DataError, match=rf"1\.png .*{named}"):
        evaluator.process([{"image_id": 1}], [output])


def test_images_of_segments_are_looked_at_before_a_training(data, tmp_path):
    """Those from all over the file; one that cannot be read is the evaluation's to refuse."""
    file = tmp_path / "panoptic.json"
    content = json.loads(file.read_text())
    [one] = content["annotations"]
    content["annotations"] = [{**one, "image_id": i, "file_name": f"{i}.png"} for i in range(250)]
    file.write_text(json.dumps(content))
    (tmp_path / "0.png").write_bytes(b"broken")
    check_panoptic(MetadataCatalog.get(data))
    for i in range(200, 210):
        Image.open(tmp_path / "1.png").convert("P").save(tmp_path / f"{i}.png")
    with pytest.raises(DataError, match=r"20\d\.png .*P"):
        check_panoptic(MetadataCatalog.get(data))


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("image_id",), [1]),
        (("file_name",), None),
        (("segments_info",), {}),
        (("segments_info", 0), 5),
        (("segments_info", 0, "id"), "a"),
        (("segments_info", 0, "category_id"), 8),
        (("segments_info", 0, "iscrowd"), [1]),
    ],
)
def test_a_broken_panoptic_file(data, tmp_path, place, value):
    _change(tmp_path, value, *place)
    for read in (PanopticQualityEvaluator, lambda name: check_panoptic(MetadataCatalog.get(name))):
        with pytest.raises(DataError, match=r"panoptic\.json"):
            read(data)
