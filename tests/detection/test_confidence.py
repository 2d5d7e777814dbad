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

from lambda_det.detection import confidence
from lambda_det.detection.confidence import ap_interval, best_score, matches_of
from tests.coco import make_ground_truth, noisy_results


@pytest.fixture(autouse=True)
def as_many_test_sets_as_users_have(monkeypatch, intervals_of_few_test_sets):
    """In other tests there are few."""
    monkeypatch.setattr(confidence, "_REPLICATES", intervals_of_few_test_sets)


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
    dataset = {"info": {}, "categories": ground_truth.dataset["categories"]}
    dataset |= {"images": [], "annotations": []}
    entries = []
    for image, count in zip(ground_truth.dataset["images"], counts, strict=True):
        for _ in range(count):
            new = len(dataset["images"])
            dataset["images"].append({**image, "id": new})
            dataset["annotations"] += [
                {**a, "image_id": new, "id": len(dataset["annotations"]) + 1 + number}
                for number, a in enumerate(ground_truth.imgToAnns[image["id"]])
            ]
            entries += [{**r, "image_id": new} for r in results if r["image_id"] == image["id"]]
    again = COCO()
    again.dataset = dataset
    again.createIndex()
    return again, entries


@pytest.mark.parametrize("seed", range(4))
def test_each_replicate_is_coco_s_ap_of_the_images_that_were_drawn(seed, capsys):
    """With a crowd, a class that some replicates lack, and scores that are equal."""
    ground_truth = make_ground_truth(5, seed)
    ground_truth.dataset["annotations"][0]["iscrowd"] = 1
    results = noisy_results(ground_truth, seed)
    for entry in results:
        entry["score"] = round(entry["score"], 1)
    classes = matches_of(evaluation(ground_truth, results))
    random = np.random.default_rng(seed)
    for counts in [
        np.ones(5, int),
        *(np.bincount(random.integers(5, size=5), minlength=5) for _ in "abcd"),
    ]:
        expected = ap(*drawn_again(ground_truth, results, counts))
        found = [one.ap(counts, np.linspace(0, 1, 101)) for one in classes]
        found = 100 * np.mean([value for value in found if value is not None])
        assert found == pytest.approx(expected, abs=1e-9)


def test_more_images_make_the_interval_narrower_and_it_holds_the_ap(capsys):
    widths = []
    for images in (6, 60):
        ground_truth = make_ground_truth(images)
        results = noisy_results(ground_truth)
        low, high = ap_interval(evaluation(ground_truth, results))
        assert (low, high) == ap_interval(evaluation(ground_truth, results))
        assert 0 <= low < ap(ground_truth, results) < high <= 100
        widths.append(high - low)
    assert widths[1] < widths[0] / 2


def test_no_interval_of_one_image_or_of_very_many(monkeypatch, capsys):
    one = make_ground_truth(1)
    assert ap_interval(evaluation(one, noisy_results(one))) is None
    several = make_ground_truth(3)
    whole = evaluation(several, noisy_results(several))
    assert ap_interval(whole) is not None
    monkeypatch.setattr(confidence, "MOST_IMAGES", 2)
    assert ap_interval(whole) is None


def _f1(ground_truth, results, category, threshold):
    """Of one class at an IoU of 0.5, by its definition; a crowd takes what lies in it."""
    left = [r for r in results if r["category_id"] == category and r["score"] >= threshold]
    truth = [a for a in ground_truth.dataset["annotations"] if a["category_id"] == category]
    objects = sum(not a["iscrowd"] for a in truth)
    right = wrong = 0
    taken = set()
    for entry in sorted(left, key=lambda r: -r["score"]):
        best, chosen = 0.5, None
        for one in (a for a in truth if a["image_id"] == entry["image_id"]):
            (x, y, w, h), (u, v, m, n) = entry["bbox"], one["bbox"]
            inside = max(min(x + w, u + m) - max(x, u), 0) * max(min(y + h, v + n) - max(y, v), 0)
            overlap = inside / (w * h if one["iscrowd"] else w * h + m * n - inside)
            if (
                one["id"] not in taken
                and overlap >= best
                and not (chosen and one["iscrowd"] and not chosen["iscrowd"])
            ):
                best, chosen = overlap, one
        if chosen is None:
            wrong += 1
        elif not chosen["iscrowd"]:
            taken.add(chosen["id"])
            right += 1
    return 2 * right / (right + wrong + objects) if right else 0.0


@pytest.mark.parametrize("seed", range(4))
def test_the_best_score_has_the_highest_f1_of_the_classes(seed, capsys):
    """With a crowd and equal scores, kept by the evaluation or matched again."""
    ground_truth = make_ground_truth(5, seed)
    ground_truth.dataset["annotations"][0]["iscrowd"] = 1
    results = noisy_results(ground_truth, seed)
    for entry in results:
        entry["score"] = round(entry["score"], 1)
    found = evaluation(ground_truth, results)
    again = best_score(matches_of(found))
    found.evaluate()
    score = best_score(matches_of(found))
    assert score == again
    with_objects = {
        a["category_id"] for a in ground_truth.dataset["annotations"] if not a["iscrowd"]
    }
    means = {
        threshold: np.mean([_f1(ground_truth, results, c, threshold) for c in with_objects])
        for threshold in {entry["score"] for entry in results}
    }
    assert means[score] == pytest.approx(max(means.values()))


def test_no_best_score_where_nothing_is_right(monkeypatch, capsys):
    ground_truth = make_ground_truth(3)
    wrong = [{**entry, "bbox": [0, 0, 1, 1]} for entry in noisy_results(ground_truth)]
    assert best_score(matches_of(evaluation(ground_truth, wrong))) is None
    monkeypatch.setattr(confidence, "_MOST_AGAIN", 2)
    right = evaluation(ground_truth, noisy_results(ground_truth))
    assert matches_of(right) == []  # not again for so many images
    right.evaluate()
    assert best_score(matches_of(right)) is not None
