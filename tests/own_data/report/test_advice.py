"""What is wrong with predictions, and what AP50 would be without it."""

import contextlib
import io
from collections import Counter

import numpy as np
import pytest
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from lambda_det.own_data.report.advice import (
    USABLE_AP50,
    Epochs,
    Evidence,
    advise,
    differs,
)
from lambda_det.own_data.report.error_types import ap50, repaired, sort_errors
from tests.coco import annotation, make_ground_truth, noisy_results


def made_of(boxes, sizes=((200, 200),)) -> COCO:
    """Ground truth of (image, category, x, y, width, height)."""
    truth = COCO()
    truth.dataset = {
        "images": [
            {"id": i, "width": w, "height": h, "file_name": f"{i}.jpg"}
            for i, (w, h) in enumerate(sizes)
        ],
        "categories": [{"id": 1, "name": "bolt"}, {"id": 2, "name": "nut"}],
        "annotations": [
            annotation(number, image, box, category_id=category)
            for number, (image, category, *box) in enumerate(boxes, start=1)
        ],
    }
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
    return truth


def predicted(category, box, score=0.9, image=0):
    return {"image_id": image, "category_id": category, "bbox": list(box), "score": score}


OBJECTS = [(0, 1, 10, 10, 40, 40), (0, 2, 100, 10, 40, 40), (0, 2, 100, 100, 40, 40)]


def by_category(truth: COCO) -> Counter:
    return Counter(a["category_id"] for a in truth.anns.values() if not a["iscrowd"])


@pytest.mark.parametrize("seed", range(8))
def test_ap50_is_coco_s(seed):
    truth = make_ground_truth(6, seed)
    crowd = truth.anns[1]
    crowd["iscrowd"] = int(seed % 2)
    entries = noisy_results(truth, seed)
    evaluation = COCOeval(truth, truth.loadRes(entries), "bbox")
    evaluation.params.iouThrs = np.array([0.5])
    evaluation.evaluate()
    evaluation.accumulate()
    precision = evaluation.eval["precision"][0, :, :, 0, -1]
    expected = 100 * precision[precision > -1].mean()
    predictions, _ = sort_errors(truth, entries, "bbox")
    assert ap50(predictions, by_category(truth)) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("category", "box", "verdict", "matched"),
    [
        (1, (12, 10, 40, 40), "right", 1),
        (1, (100, 12, 40, 40), "class", 2),
        (1, (30, 10, 40, 40), "localisation", 1),
        (1, (80, 10, 40, 40), "both", 2),
        (1, (10, 150, 20, 20), "background", None),
    ],
)
def test_each_kind_of_error_is_told(category, box, verdict, matched):
    (found,), missed = sort_errors(made_of(OBJECTS), [predicted(category, box)], "bbox")
    assert (found.verdict, found.matched) == (verdict, matched)
    # One that is matched is not missed, though the prediction is wrong
    expected = {1, 2, 3} - ({matched} if verdict in ("right", "class", "localisation") else set())
    assert missed == expected


def test_the_second_prediction_of_an_object_is_one_too_many():
    entries = [predicted(1, (10, 10, 40, 40), 0.4), predicted(1, (12, 10, 40, 40), 0.7)]
    predictions, _ = sort_errors(made_of(OBJECTS), entries, "bbox")
    assert [(p.verdict, p.score) for p in predictions] == [("right", 0.7), ("duplicate", 0.4)]


def test_masks_are_compared_as_masks():
    truth = make_ground_truth(2)
    polygons = [
        {**predicted(a["category_id"], a["bbox"], image=a["image_id"])}
        | {"segmentation": truth.annToRLE(a)}
        for a in truth.anns.values()
    ]
    predictions, missed = sort_errors(truth, polygons, "segm")
    assert {p.verdict for p in predictions} == {"right"} and not missed


def test_a_repair_finds_an_object_once():
    truth = made_of(OBJECTS)
    entries = [
        predicted(1, (100, 12, 40, 40), 0.9),  # a nut taken for a bolt, twice
        predicted(1, (100, 10, 40, 40), 0.8),
        predicted(2, (120, 100, 40, 40), 0.7),  # a nut whose box lies badly
        predicted(2, (10, 150, 20, 20), 0.6),  # nothing is there
    ]
    predictions, missed = sort_errors(truth, entries, "bbox")
    classes = {i: a["category_id"] for i, a in truth.anns.items()}
    after = repaired(predictions, {0, 1, 2, 3}, classes)
    assert [(p.category, p.matched, p.verdict) for p in after] == [(2, 2, "right"), (2, 3, "right")]
    assert missed == {1}
    assert ap50(after, {2: 2}) == 100


def changes(boxes, entries, metrics=(), trained=None, **options):
    trained = trained or {"bolt": 100, "nut": 100}
    found = advise(Evidence(made_of(boxes), entries, "bbox", list(metrics), trained, **options))
    return found


PERFECT = [predicted(category, box) for _, category, *box in OBJECTS]


def test_nothing_is_advised_where_all_is_right():
    assert changes(OBJECTS, PERFECT) == []


def test_the_largest_loss_is_named_first_with_what_shows_it():
    lacking = [predicted(1, (10, 150, 30, 30), 0.95)]  # surer than all that is annotated
    first, *others = changes(OBJECTS, PERFECT + lacking)
    assert "0.jpg" in first.change and first.gain == pytest.approx(25)
    assert [c.gain for c in others] == sorted((c.gain for c in others), reverse=True)
    unsure = [predicted(1, (10, 150, 30, 30), 0.3)]
    assert all("0.jpg" not in change.change for change in changes(OBJECTS, PERFECT + unsure))


@pytest.mark.parametrize(
    ("some", "of", "others", "of_others"),
    [
        (22, 100, 21, 100),
        (3, 3, 0, 3),
        (5, 5, 3, 9),
        (10, 12, 3, 14),
        (300, 1000, 250, 1000),
        (1, 9, 8, 9),
        (0, 5, 0, 5),
        (0, 0, 2, 3),
        (2, 2, 0, 0),
    ],
)
def test_shares_differ_if_shuffled_objects_rarely_do(some, of, others, of_others):
    rng = np.random.default_rng(0)
    marks = np.arange(of + of_others) < some + others
    drawn = np.array([rng.permutation(marks)[:of].sum() for _ in range(4000)])
    by_chance = (drawn >= some).mean()
    assert not 0.007 < by_chance < 0.013, "too few permutations to tell"
    assert differs(some, of, others, of_others) == (by_chance < 0.01)


def test_shares_of_many_objects_are_told_apart():
    assert not differs(10_100, 50_000, 10_000, 50_000) and differs(10_800, 50_000, 10_000, 50_000)


def in_rows(number, side, category=1, top=0):
    """Objects of a side in pixels."""
    return [(0, category, 50 * i, top, side, side) for i in range(number)]


def of_them(objects, number):
    """Predictions of the first objects of some."""
    return [predicted(category, box) for _, category, *box in objects[:number]]


TINY_INPUT = 0.3  # objects of 40 pixels have a side of 12 in the input


@pytest.mark.parametrize(
    ("seen", "scale", "advised"), [(5, TINY_INPUT, True), (10, TINY_INPUT, False), (5, 0.6, False)]
)
def test_objects_that_are_all_tiny_want_tiles_though_none_is_larger(seen, scale, advised):
    objects = in_rows(10, 40)
    found = changes(objects, of_them(objects, seen), scale=scale)
    found = [change for change in found if "--tile" in change.change and change.gain > 0]
    assert len(found) == advised
    for change in found:
        assert "12 pixels" in change.evidence and "50%" in change.evidence
    of_tiles = changes(objects, of_them(objects, 5), scale=TINY_INPUT, is_tiled=True)
    assert any("smaller tiles" in change.change for change in of_tiles)
    tiny = in_rows(10, 12)  # in tiles that keep their pixels smaller ones show nothing new
    of_tiles = changes(tiny, of_them(tiny, 5), scale=1.0, is_tiled=True)
    assert any("--size" in change.change for change in of_tiles)


def test_a_detector_that_is_not_usable_tells_nothing_about_annotations():
    """Its sure predictions of nothing, loose boxes and wrong classes are noise."""
    noise = [predicted(1, (5 * i, 160, 4, 4), 0.95) for i in range(30)]
    noise += [predicted(1, (100, 12, 40, 40), 0.9), predicted(2, (20, 10, 40, 40), 0.9)]
    objects = in_rows(10, 40)
    logged = [{"iteration": 19, "total_loss": 3.0}]
    found = changes(OBJECTS, noise, logged)
    assert ap50(sort_errors(made_of(OBJECTS), noise, "bbox")[0], {1: 1, 2: 2}) < USABLE_AP50
    assert [change.error for change in found] == ["training"]
    assert "first_batch.jpg" in found[0].change
    # of tiny objects that is said before
    first, second = changes(objects, noise, logged, scale=TINY_INPUT)
    assert "--tile" in first.change and second.error == "training"


def test_an_evaluation_alone_is_no_training_to_be_changed():
    noise = [predicted(1, (5 * i, 160, 4, 4), 0.95) for i in range(30)]
    assert not [change for change in changes(OBJECTS, noise) if change.error == "training"]
    assert changes([], noise) == []  # a test set without objects


def test_errors_have_the_words_of_the_field():
    entries = [
        predicted(1, (10, 10, 40, 40), 0.99),
        predicted(1, (11, 10, 40, 40), 0.98),  # a duplicate
        predicted(1, (100, 10, 40, 40), 0.97),  # a nut
        predicted(2, (120, 100, 40, 40), 0.96),  # lies badly
        predicted(1, (10, 150, 30, 30), 0.95),  # nothing is there
    ]
    missed = (0, 1, 150, 150, 40, 40)
    found = changes([*OBJECTS, missed], entries, trained={"bolt": 3, "nut": 100})
    words = {"duplicate", "class", "localisation", "background", "missed"}
    assert {change.error for change in found} == words


@pytest.mark.parametrize(
    ("epochs", "is_first"), [(Epochs(5, 30), True), (Epochs(28, 30), False), (None, False)]
)
def test_a_short_run_whose_ap50_rises_is_to_go_on_first(epochs, is_first):
    """The loss of its first evaluation, in which next to nothing is detected, does not count."""
    values = zip((133, 266, 415), (54.5, 69.1, 76.6), (2.98, 3.63, 3.58), strict=True)
    metrics = [
        {"iteration": step, "bbox/AP50": ap, "validation/total_loss": loss}
        for step, ap, loss in values
    ]
    lacking = [predicted(1, (10, 150, 30, 30), 0.95)]
    found = changes(OBJECTS, PERFECT + lacking, metrics, epochs=epochs)
    assert [change.error for change in found].index("training") == (0 if is_first else 1)
    (longer,) = [change for change in found if change.error == "training"]
    assert longer.gain == pytest.approx(7.5)
    if epochs is not None:
        assert str(epochs) in longer.evidence and "--epochs 30" in longer.change


@pytest.mark.parametrize(
    ("epochs", "advised"), [(Epochs(3, 30), True), (Epochs(29, 30), False), (None, False)]
)
def test_a_short_run_of_one_evaluation_is_to_go_on(epochs, advised):
    found = changes(OBJECTS, PERFECT, rising(60), epochs=epochs)
    assert [change.change for change in found] == ["Train longer, with --epochs 30."] * advised
    assert all("3 of 30 epochs" in change.evidence for change in found)


@pytest.mark.parametrize(
    ("seen", "scale", "advised"),
    [
        ((2, 9), 1, True),
        ((6, 8), 1, False),  # 40 and 20 % of ten are no difference
        ((9, 2), 1, False),
        ((2, 9), 2.5, False),  # all are larger than SMALL in the network's input
    ],
)
def test_objects_that_are_missed_more_often_because_they_are_small_want_a_larger_input(
    seen, scale, advised
):
    small, large = in_rows(10, 16), in_rows(10, 40, top=100)
    entries = of_them(small, seen[0]) + of_them(large, seen[1])
    found = [c for c in changes(small + large, entries, scale=scale) if "larger size" in c.change]
    assert len(found) == advised
    if advised:
        assert "80%" in found[0].evidence and "10%" in found[0].evidence


def test_a_crowd_is_no_object_that_might_be_missed():
    small, large = in_rows(10, 16), in_rows(90, 40, top=100)
    truth = made_of(small + large)
    for entry in list(truth.anns.values())[20:]:
        entry["iscrowd"] = 1
    (change,) = advise(Evidence(truth, of_them(large, 10), "bbox", [], {}))
    assert "of 10 larger" in change.evidence


@pytest.mark.parametrize(("scale", "advised"), [(1.5, True), (384 / 200, False)])
def test_images_that_are_enlarged_already_want_no_larger_input(scale, advised):
    """A recipe gives images of 200 pixels an input of 384, and says that more show nothing new."""
    large = in_rows(9, 40, top=100)
    found = changes([*in_rows(9, 10), *large], of_them(large, 9), scale=scale)
    assert any("larger size" in change.change for change in found) is advised


def test_the_class_with_few_examples_is_named():
    found = changes(OBJECTS, PERFECT[1:], trained={"bolt": 3, "nut": 100})
    assert [c.change for c in found] == ["Add examples of bolt."]
    assert "(3 objects in training)" in found[0].evidence
    assert changes(OBJECTS, PERFECT[1:], trained={"bolt": 300, "nut": 100}) == []


@pytest.mark.parametrize(("trained", "advised"), [(1, False), (9, False), (10, True), (30, True)])
def test_a_run_that_has_hardly_begun_wants_no_examples_of_a_class(trained, advised):
    few = {"bolt": 3, "nut": 100}
    found = changes(OBJECTS, PERFECT[1:], trained=few, epochs=Epochs(trained, 30))
    assert any("examples of bolt" in change.change for change in found) is advised


def test_an_only_class_with_many_examples_needs_no_more():
    objects = [(0, 1, 10, 10, 40, 40), (0, 1, 100, 10, 40, 40)]
    entries = [predicted(1, (10, 10, 40, 40))]
    found = {count: changes(objects, entries, trained={"bolt": count}) for count in (99, 100)}
    assert [c.change for c in found[99]] == ["Add examples of bolt."] and found[100] == []


NAN = float("nan")


@pytest.mark.parametrize(
    ("ap", "loss", "gain"),
    [
        ((10, 20, 30, 40, 50, 60), (), 20),  # 40 at two thirds of the steps
        ((10, 20, 60, 50, 50, 50), (), 10),  # it was better before
        ((80, 86, 85.8, 86.1, 86.3), (), None),  # by less than evaluations differ by chance
        ((80, 86, 85.1, 85.4, 87.5), (), None),  # only the last one is better than one before
        ((0.25, 0.25, 0.5, 0.75, 1.25), (), 0.75),  # it has hardly begun
        ((56, 57, 58, 58, 59, 60), (3, 2, 1, 1, 1, 1), 2),
        ((10, 12, 15, 38, 39, 40), (3, 2, 1, 2, 2, 2), 2),  # the 1 is of next to no detection
        ((10, 20, 30, 40, 50, 60), (3, 2, 1, 1, 1.1, 1.2), 20),  # it is young
        ((10, 60), (), None),  # too few evaluations
        ((NAN, 10, 20, 30, 40), (), 20),  # its first evaluation is without any prediction
        ((10, 20, 30, NAN), (), 30),  # its last one is
        ((NAN, NAN, NAN), (), None),
    ],
)
def test_a_run_that_was_still_rising_is_to_go_on(ap, loss, gain):
    metrics = [{"iteration": 100 * (i + 1), "bbox_EMA/AP50": value} for i, value in enumerate(ap)]
    for line, value in zip(metrics, loss, strict=False):
        line["validation/total_loss"] = value
    gains = [c.gain for c in changes(OBJECTS, PERFECT, metrics)]
    assert gains == ([] if gain is None else [gain])


def rising(*values):
    return [{"iteration": 100 * (i + 1), "bbox/AP50": value} for i, value in enumerate(values)]


@pytest.mark.parametrize(
    ("values", "is_first"), [((1, 5, 7, 8, 9, 10), True), ((90, 91, 92), False)]
)
def test_a_young_run_is_to_go_on_before_its_annotations_are_looked_at(values, is_first):
    lacking = [predicted(1, (10, 150, 30, 30), 0.95)]
    found = changes(OBJECTS, PERFECT + lacking, rising(*values))
    assert [("longer" in change.change) for change in found] == [is_first, not is_first]


def test_no_training_raises_an_ap50_beyond_100():
    metrics = rising(90, 97.6, 99.9)
    (longer,) = [c for c in changes(OBJECTS, PERFECT, metrics) if "longer" in c.change]
    assert longer.gain == pytest.approx(0.1)
    (none,) = changes(OBJECTS, PERFECT, rising(90, 97.6, 100))
    assert none.gain == 0


def test_a_run_that_was_evaluated_only_late_tells_nothing():
    metrics = [{"iteration": 90 + i, "bbox/AP50": 10 * i} for i in range(5)]
    assert changes(OBJECTS, PERFECT, metrics) == []


TWENTY = [f"part {i}" for i in range(20)]


def of_twenty(confused=0, missed=()):
    """Ground truth of 20 classes with 5 objects each, and predictions: of each of the first
    ``confused`` classes one has the name of the next class, and of ``missed`` ones none is found.
    """
    objects = [(0, 1 + c, 50 * n, 50 * c, 40, 40) for c in range(20) for n in range(5)]
    truth = made_of(objects, sizes=((300, 1100),))
    truth.dataset["categories"] = [{"id": 1 + c, "name": name} for c, name in enumerate(TWENTY)]
    with contextlib.redirect_stdout(io.StringIO()):
        truth.createIndex()
    entries = []
    for place, (_, category, *box) in enumerate(objects):
        is_wrong = category <= confused and place % 5 == 0
        if category not in missed:
            entries.append(predicted(category + 1 if is_wrong else category, box))
    return truth, entries


def test_of_twenty_classes_those_that_are_missed_are_named_together():
    """Each counts a twentieth of AP, so alone none would stand out."""
    truth, entries = of_twenty(missed=range(1, 9))
    trained = {name: 20 if i < 8 else 400 for i, name in enumerate(TWENTY)}
    (change,) = advise(Evidence(truth, entries, "bbox", [], trained))
    assert change.error == "missed" and change.gain == pytest.approx(40)
    assert "part 4 and 3 more" in change.change and "(20 objects in training)" in change.evidence


def test_of_twenty_classes_that_are_confused_all_count():
    truth, entries = of_twenty(confused=12)
    first, *_ = advise(Evidence(truth, entries, "bbox", [], dict.fromkeys(TWENTY, 400)))
    assert first.error == "class" and "12, in 12 pairs" in first.evidence
    whole = 100 - ap50(sort_errors(truth, entries, "bbox")[0], by_category(truth))
    assert first.gain == pytest.approx(whole)


def trained_to(trained, tested, values):
    """The metrics of a run with its losses at the end."""
    metrics = rising(*values)
    for line in metrics:
        line |= {"total_loss": trained, "validation/total_loss": tested}
    return metrics


@pytest.mark.parametrize(
    ("losses", "seen", "first"),
    [
        ((0.4, 1.6), 4, "like the held-out ones"),  # it knows the training's light only
        ((0.4, 1.6), 1, "like the held-out ones"),  # and finds next to nothing here
        ((0.4, 0.6), 4, None),
    ],
)
def test_a_detector_that_knows_only_its_own_images_wants_others(losses, seen, first):
    """As where the two parts were taken in other light."""
    bolts, nuts = in_rows(10, 40), in_rows(10, 40, category=2, top=100)
    entries = of_them(bolts, seen) + of_them(nuts, seen)
    values = (seen * 10 - 1, seen * 10, seen * 10)
    counts = {"bolt": 400, "nut": 400}
    found = changes(bolts + nuts, entries, trained_to(*losses, values), counts)
    texts = [change.change for change in found]
    if first is None:
        assert not any("test set" in text for text in texts)
    else:
        assert first in texts[0] and "0.4" in found[0].evidence and "1.6" in found[0].evidence
    if seen == 1:  # it has hardly begun
        metrics = trained_to(*losses, values)
        found = changes(bolts + nuts, entries, metrics, counts, epochs=Epochs(3, 30))
        assert [change.change for change in found] == ["Train longer, with --epochs 30."]


def test_a_run_that_forgets_is_not_to_go_on_before_all_else():
    metrics = trained_to(0.4, 1.0, (60, 70, 72, 68, 66, 65))
    for line, loss in zip(metrics, (1.0, 0.8, 0.7, 0.8, 0.9, 1.0), strict=True):
        line["validation/total_loss"] = loss
    lacking = [predicted(1, (10, 150, 30, 30), 0.95)]
    first, *others = changes(OBJECTS, PERFECT + lacking, metrics)
    assert "not train longer" in first.change and first.gain == pytest.approx(7)
    assert "72.0 before" in first.evidence and others
    assert not any("Train longer" in change.change for change in others)
