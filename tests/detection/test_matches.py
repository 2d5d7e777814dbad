"""The interval of an AP, against pycocotools on data sets whose images were drawn again; the score
with the best F1, against one threshold after the other.
"""

import contextlib
import copy
import io

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from lambda_det.detection import matches
from lambda_det.detection.matches import (
    FALSE,
    IGNORED,
    IOU_50,
    ap_interval,
    best_score,
    evaluation_of,
    matches_of,
    objects_found,
)
from tests.coco import annotation, coco_content, make_ground_truth, noisy_results


@pytest.fixture(autouse=True)
def as_many_test_sets_as_users_have(monkeypatch, intervals_of_few_test_sets):
    """In other tests there are few."""
    monkeypatch.setattr(matches, "_REPLICATES", intervals_of_few_test_sets)


def evaluation(ground_truth, results) -> COCOeval:
    return COCOeval(ground_truth, ground_truth.loadRes(copy.deepcopy(results)), "bbox")


def ap(ground_truth, results) -> float:
    """COCO's own figure, in percent."""
    with contextlib.redirect_stdout(io.StringIO()):
        whole = evaluation(ground_truth, results)
        whole.evaluate()
        whole.accumulate()
        whole.summarize()
    return 100 * whole.stats[0]


def drawn_again(ground_truth, results, counts):
    """The data set in which image i is there counts[i] times, under ids of their own."""
    again, entries = COCO(), []
    again.dataset = {"info": {}, "categories": ground_truth.dataset["categories"]}
    images = again.dataset["images"] = []
    annotations = again.dataset["annotations"] = []
    for image in np.repeat(np.array(ground_truth.dataset["images"]), counts):
        new = {"image_id": len(images)}
        images.append({**image, "id": len(images)})
        for one in ground_truth.imgToAnns[image["id"]]:
            annotations.append({**one, **new, "id": len(annotations) + 1})
        entries += [{**r, **new} for r in results if r["image_id"] == image["id"]]
    again.createIndex()
    return again, entries


def crowded(seed):
    """Truth with a crowd, and results of which many scores are equal."""
    ground_truth = make_ground_truth(5, seed)
    ground_truth.dataset["annotations"][0]["iscrowd"] = 1
    results = noisy_results(ground_truth, seed)
    return ground_truth, [{**entry, "score": round(entry["score"], 1)} for entry in results]


@pytest.mark.parametrize("seed", range(4))
def test_each_replicate_is_coco_s_ap_of_the_images_that_were_drawn(seed):
    """Also of a class that some replicates lack."""
    ground_truth, results = crowded(seed)
    classes = matches_of(evaluation(ground_truth, results))
    random = np.random.default_rng(seed)
    drawn = [np.bincount(random.integers(5, size=5), minlength=5) for _ in range(4)]
    for counts in [np.ones(5, int), *drawn]:
        expected = ap(*drawn_again(ground_truth, results, counts))
        found = [one.ap(counts, np.linspace(0, 1, 101)) for one in classes]
        found = 100 * np.mean([value for value in found if value is not None])
        assert found == pytest.approx(expected, abs=1e-9)


def _interval(computed):
    return ap_interval(computed, matches_of(computed))


def test_more_images_make_the_interval_narrower_and_it_holds_the_ap():
    widths = []
    for images in (6, 60):
        ground_truth = make_ground_truth(images)
        results = noisy_results(ground_truth)
        low, high = _interval(evaluation(ground_truth, results))
        assert (low, high) == _interval(evaluation(ground_truth, results))
        assert 0 <= low < ap(ground_truth, results) < high <= 100
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


def test_a_class_of_one_image_does_not_widen_the_interval_where_it_is_not_drawn():
    """Of 20 images, whose class is always found, one has a class that is never found."""
    ground_truth = make_ground_truth(20)
    annotations = ground_truth.dataset["annotations"]
    usual, rare, *_ = ground_truth.cats
    for one in annotations:
        one["category_id"] = usual
    keys = ("image_id", "category_id", "bbox")
    results = [{key: one[key] for key in keys} | {"score": 0.9} for one in annotations[1:]]
    annotations[0]["category_id"] = rare
    ground_truth.createIndex()
    assert _interval(evaluation(ground_truth, results)) == pytest.approx((50, 50))


def test_no_interval_of_one_image_or_of_very_many(monkeypatch):
    one = make_ground_truth(1)
    assert _interval(evaluation(one, noisy_results(one))) is None
    several = make_ground_truth(2)
    whole = evaluation(several, noisy_results(several))
    assert _interval(whole) is not None
    monkeypatch.setattr(matches, "MOST_IMAGES", 1)
    assert _interval(whole) is None


def _f1(ground_truth, results, category, threshold):
    """Of one class at an IoU of 0.5, by its definition; a crowd takes what lies in it."""
    truth = [a for a in ground_truth.dataset["annotations"] if a["category_id"] == category]
    right = wrong = 0
    taken = set()
    for entry in sorted(results, key=lambda r: -r["score"]):
        if entry["category_id"] != category or entry["score"] < threshold:
            continue
        fits = []
        for one in truth:
            (x, y, w, h), (u, v, m, n) = entry["bbox"], one["bbox"]
            inside = max(min(x + w, u + m) - max(x, u), 0) * max(min(y + h, v + n) - max(y, v), 0)
            overlap = inside / (w * h if one["iscrowd"] else w * h + m * n - inside)
            is_here = one["image_id"] == entry["image_id"] and one["id"] not in taken
            if is_here and overlap >= 0.5:
                fits.append((not one["iscrowd"], overlap, one["id"]))
        is_object, _, chosen = max(fits, default=(False, 0, None))
        wrong += not fits
        right += is_object
        taken |= {chosen} if is_object else set()
    objects = sum(not a["iscrowd"] for a in truth)
    return 2 * right / (right + wrong + objects) if right else 0.0


@pytest.mark.parametrize("seed", range(4))
def test_the_best_score_has_the_highest_f1_of_the_classes(seed):
    """Kept by the evaluation, or matched again."""
    ground_truth, results = crowded(seed)
    found = evaluation(ground_truth, results)
    again = best_score(matches_of(found))
    found.evaluate()
    score = best_score(matches_of(found))
    assert score == again
    objects = [a for a in ground_truth.dataset["annotations"] if not a["iscrowd"]]
    classes, scores = {a["category_id"] for a in objects}, {entry["score"] for entry in results}
    assert score == min(scores) or score not in scores
    scores.add(score)
    means = {s: np.mean([_f1(ground_truth, results, c, s) for c in classes]) for s in scores}
    assert means[score] == pytest.approx(max(means.values()))
    for one in matches_of(found):  # a class alone has its own, at which the table counts
        best = one.best_threshold()
        if one.right[IOU_50].any():
            f1 = 2 * best.precision * best.recall / (best.precision + best.recall)
            assert f1 == pytest.approx(_f1(ground_truth, results, one.category, best.score))
            assert best.score == best_score([one])


def test_no_best_score_where_nothing_is_right(monkeypatch):
    ground_truth = make_ground_truth(3)
    wrong = [{**entry, "bbox": [0, 0, 1, 1]} for entry in noisy_results(ground_truth)]
    assert best_score(matches_of(evaluation(ground_truth, wrong))) is None
    monkeypatch.setattr(matches, "_MOST_AGAIN", 2)
    right = evaluation(ground_truth, noisy_results(ground_truth))
    assert matches_of(right) == []  # not again for so many images
    right.evaluate()
    assert best_score(matches_of(right)) is not None


BOX = (10, 10, 50, 50)
# Nearly BOX: an intersection over union of 0.9; HALF: of 0.45
NEAR, HALF = (10, 10, 50, 46), (10, 10, 50, 28)


def _annotations(rows, **more):
    """COCO's of (category, corners), with ids from 1 on."""
    return [
        annotation(number, 1, [x0, y0, x1 - x0, y1 - y0], category_id=category, **more)
        for number, (category, (x0, y0, x1, y1)) in enumerate(rows, start=1)
    ]


def _truth(objects, crowds):
    truth = COCO()
    rows = [*_annotations(objects), *({**a, "id": 9} for a in _annotations(crowds, iscrowd=1))]
    truth.dataset = coco_content({1: "1.png"}, rows, {1: "a", 2: "b"})
    truth.createIndex()
    return truth


@pytest.mark.parametrize(
    ("predictions", "objects", "crowds", "expected"),
    [
        ([], [(1, BOX)], [], []),
        ([(0.9, 2, NEAR)], [(1, BOX)], [], [FALSE]),
        ([(0.9, 1, HALF)], [(1, BOX)], [], [FALSE]),
        ([(0.8, 1, BOX), (0.9, 1, NEAR)], [(1, BOX)], [], [FALSE, 1]),
        ([(0.8, 1, BOX), (0.9, 1, NEAR)], [(1, BOX), (1, NEAR)], [], [1, 2]),
        # The better score takes what the other one needs, though it would fit the second object
        (
            [(0.8, 1, (0, 10, 40, 50)), (0.9, 1, (11, 10, 51, 50))],
            [(1, BOX), (1, (14, 10, 54, 50))],
            [],
            [FALSE, 1],
        ),
        ([(0.9, 1, (12, 12, 20, 20))], [], [(1, BOX)], [IGNORED]),
        ([(0.9, 2, (12, 12, 20, 20))], [], [(1, BOX)], [FALSE]),
        ([(0.9, 1, (40, 40, 99, 99))], [], [(1, BOX)], [FALSE]),
    ],
)
def test_each_prediction_finds_one_object_of_its_class(
    predictions, objects, crowds, expected, capsys
):
    truth = _truth(objects, crowds)
    boxes = _annotations((category, box) for _, category, box in predictions)
    results = [{**a, "score": score} for a, (score, _, _) in zip(boxes, predictions, strict=True)]
    capsys.readouterr()
    assert objects_found(evaluation_of(truth, results, "bbox")) == expected
    assert not capsys.readouterr().out  # of pycocotools
