"""The interval of an AP, against pycocotools on data sets whose images were drawn again."""

import contextlib
import copy
import io

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from lambda_det.detection import confidence
from lambda_det.detection.confidence import ap_interval
from tests.coco import make_ground_truth, noisy_results


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
    classes = confidence._classes(evaluation(ground_truth, results))
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
