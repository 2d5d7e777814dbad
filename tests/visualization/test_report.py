from __future__ import annotations

import contextlib
import io
import json
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from lambda_det.errors import DataError
from lambda_det.visualization import report
from lambda_det.visualization.class_results import evaluate_detections
from lambda_det.visualization.page import Page
from lambda_det.visualization.report import read_metrics

CLASSES = ("bolt", "nut", "<b>washer</b>")


def make_ground_truth(images: int = 6, seed: int = 0) -> COCO:
    """Squares of three classes in a grid, and a crowd of bolts in image 0."""
    rng = np.random.default_rng(seed)
    annotations = []
    for image in range(images):
        for place in range(4):
            x, y, side = 20 + 100 * (place % 2), 20 + 100 * (place // 2), int(rng.integers(20, 60))
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": image,
                    "category_id": 10 * (1 + int(rng.integers(3))),
                    "bbox": [x, y, side, side],
                    "segmentation": [[x, y, x + side, y, x + side, y + side, x, y + side]],
                    "area": side * side,
                    "iscrowd": 0,
                }
            )
    ground_truth = COCO()
    ground_truth.dataset = {
        "info": {},
        "images": [{"id": i, "width": 220, "height": 220} for i in range(images)],
        "annotations": annotations,
        "categories": [{"id": 10 * (i + 1), "name": name} for i, name in enumerate(CLASSES)],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        ground_truth.createIndex()
    return ground_truth


def noisy_results(ground_truth: COCO, seed: int = 1) -> list[dict]:
    """Most objects, moved a little, some of a wrong class, and some of nothing."""
    rng = np.random.default_rng(seed)
    results = []
    for annotation in ground_truth.dataset["annotations"]:
        if rng.random() < 0.2:
            continue
        x, y, w, h = annotation["bbox"]
        box = [x + rng.integers(0, 8), y + rng.integers(0, 8), w, h]
        category = annotation["category_id"] if rng.random() < 0.8 else 10
        results.append(
            {
                "image_id": annotation["image_id"],
                "category_id": category,
                "bbox": [float(value) for value in box],
                "score": float(rng.random()),
            }
        )
    return results


@pytest.fixture
def ground_truth():
    return make_ground_truth()


def test_numbers_by_class_are_coco_s(ground_truth):
    results = noisy_results(ground_truth)
    detections = evaluate_detections(ground_truth, results, "bbox", 0.5)
    for category, result in zip((10, 20, 30), detections.classes, strict=True):
        evaluation = COCOeval(ground_truth, ground_truth.loadRes(results), "bbox")
        evaluation.params.catIds = [category]
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        expected = [100 * evaluation.stats[i] for i in (0, 1, 3, 4, 5)]
        found = [result.ap, result.ap50, result.small, result.medium, result.large]
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other) or (np.isnan(one) and other < 0)
        anns = ground_truth.dataset["annotations"]
        assert result.objects == sum(a["category_id"] == category for a in anns)


def test_best_threshold_has_the_highest_f1(ground_truth):
    results = noisy_results(ground_truth)
    for result in evaluate_detections(ground_truth, results, "bbox", 0.0).classes:
        category = 10 * (1 + CLASSES.index(result.name))
        best = 0.0
        for score in {r["score"] for r in results}:
            kept = [r for r in results if r["score"] >= score]
            matrix = evaluate_detections(ground_truth, kept, "bbox", 0.0)
            place = category // 10 - 1
            # The confusion matrix matches across classes, so count this class alone
            own = [r for r in kept if r["category_id"] == category]
            if not own:
                continue
            matrix = evaluate_detections(ground_truth, own, "bbox", 0.0).confusion
            right = matrix[place, place]
            precision, recall = right / len(own), right / result.objects
            best = max(best, 2 * precision * recall / max(precision + recall, 1e-12))
        f1 = 2 * result.precision * result.recall / (result.precision + result.recall)
        assert f1 == pytest.approx(best)


def _entry(category: int, box: list[float], score: float) -> dict:
    return {"image_id": 0, "category_id": category, "bbox": box, "score": score}


def test_confusion_counts_every_object_and_prediction_once():
    ground_truth = make_ground_truth(images=1)
    annotations = ground_truth.dataset["annotations"]
    for annotation, category in zip(annotations, (10, 20, 30, 10), strict=True):
        annotation["category_id"] = category
    annotations[3]["iscrowd"] = 1
    ground_truth.createIndex()
    boxes = [[float(v) for v in a["bbox"]] for a in annotations]
    results = [
        _entry(10, boxes[0], 0.9),  # right
        _entry(10, boxes[0], 0.8),  # the same again: nothing is left there
        _entry(30, boxes[1], 0.7),  # another class
        _entry(30, boxes[2], 0.2),  # below the score, so the object is missed
        _entry(10, boxes[3], 0.9),  # in a crowd: not counted
        _entry(20, [200.0, 200.0, 10.0, 10.0], 0.6),  # of nothing
    ]
    found = evaluate_detections(ground_truth, results, "bbox", 0.5).confusion
    expected = np.zeros((4, 4), int)
    expected[0, 0] = expected[1, 2] = expected[2, 3] = expected[3, 0] = expected[3, 1] = 1
    assert (found == expected).all()


class _Check(HTMLParser):
    """Tags that are open, and what the page would fetch."""

    VOID = frozenset(["meta", "img", "br", "path", "use"])

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.sources: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.sources += [v for k, v in attrs if k in ("src", "href", "xlink:href") and v]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_page_is_whole_and_fetches_nothing(ground_truth):
    detections = evaluate_detections(ground_truth, noisy_results(ground_truth), "bbox", 0.5)
    page = Page("a <run> & more", "where")
    report._add_classes(page, [detections])
    page.single_figure(report.draw_confusion(detections))
    page.picture(np.zeros((8, 8, 3), np.uint8), "a picture")
    page.table(("key", "before", "now"), [("A.B", [1], "<x>")], text=True)
    text = page.text()
    check = _Check()
    check.feed(text)
    check.close()
    assert not check.open
    assert all(source.startswith(("#", "data:")) for source in check.sources)
    assert "<script" not in text and "a &lt;run&gt; &amp; more" in text
    assert CLASSES[2] not in text and "&lt;b&gt;washer&lt;/b&gt;" in text
    assert not re.search(r"url\((?!#)", text)


def test_curves_of_a_run(tmp_path):
    records = [{"iteration": i, "total_loss": 3 / (i + 1), "lr": 0.1} for i in range(19, 2000, 20)]
    records.append({"iteration": 1999, "bbox/AP": 40.0})
    (tmp_path / "metrics.json").write_text("\n".join(map(json.dumps, records)) + "\n")
    assert read_metrics(tmp_path) == records
    assert [figure.count("<svg") for figure in report.draw_curves(records)] == [1, 1, 1]
    assert report._summary(records)["box AP"] == "40.0"


@pytest.mark.parametrize("content", [None, "{]"], ids=["missing", "damaged"])
def test_bad_metrics(content, tmp_path):
    if content:
        (tmp_path / "metrics.json").write_text(content)
    with pytest.raises(DataError, match=r"metrics\.json"):
        read_metrics(tmp_path)
