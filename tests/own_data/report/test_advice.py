"""What is wrong with predictions, and what AP50 would be without it."""

import math
from collections import Counter

import numpy as np
import pytest
from pycocotools.cocoeval import COCOeval

from lambda_det.own_data.report.advice import (
    USABLE_AP50,
    Epochs,
    Evidence,
    advise,
    differs,
)
from lambda_det.own_data.report.error_types import ap50, repaired, sort_errors
from tests.coco import (
    annotation,
    coco_content,
    indexed,
    make_ground_truth,
    noisy_results,
    predicted,
)


def made_of(objects, classes=("bolt", "nut"), size=(200, 200)):
    """Ground truth of one image with (category, x, y, width, height)."""
    annotations = [
        annotation(number, 0, box, category_id=category)
        for number, (category, *box) in enumerate(objects, start=1)
    ]
    return indexed(coco_content({0: "0.jpg"}, annotations, dict(enumerate(classes, 1)), size))


def all_of(objects):
    return [predicted(category, box) for category, *box in objects]


OBJECTS = [(1, 10, 10, 40, 40), (2, 100, 10, 40, 40), (2, 100, 100, 40, 40)]
PERFECT = all_of(OBJECTS)
LACKING = predicted(1, (10, 150, 30, 30), 0.95)  # surer than all that is annotated
NOISE = [predicted(1, (5 * i, 160, 4, 4), 0.95) for i in range(30)]


def by_category(truth):
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
        predicted(a["category_id"], (0, 0, 1, 1), image=a["image_id"])
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
    after = repaired(predictions, predictions, classes)
    assert [(p.category, p.matched, p.verdict) for p in after] == [(2, 2, "right"), (2, 3, "right")]
    assert missed == {1}
    assert ap50(after, {2: 2}) == 100


def changes(objects, entries, metrics=(), counts=(100, 100), **options):
    trained = dict(zip(("bolt", "nut"), counts, strict=True))
    return advise(Evidence(made_of(objects), entries, "bbox", list(metrics), trained, **options))


def of_error(error, found):
    return [change for change in found if change.error == error]


def test_the_largest_loss_is_named_first_with_what_shows_it():
    assert changes(OBJECTS, PERFECT) == []
    first, *others = changes(OBJECTS, [*PERFECT, LACKING])
    assert "0.jpg" in first.change and first.gain == pytest.approx(25)
    assert [c.gain for c in others] == sorted((c.gain for c in others), reverse=True)
    unsure = changes(OBJECTS, [*PERFECT, LACKING | {"score": 0.3}])
    assert all("0.jpg" not in change.change for change in unsure)


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
    return [(category, 50 * i, top, side, side) for i in range(number)]


TINY_INPUT = 0.3  # objects of 40 pixels have a side of 12 in the input


@pytest.mark.parametrize(
    ("seen", "scale", "advised"), [(5, TINY_INPUT, True), (10, TINY_INPUT, False), (5, 0.6, False)]
)
def test_objects_that_are_all_tiny_want_tiles_though_none_is_larger(seen, scale, advised):
    objects, lying_badly = in_rows(10, 40), in_rows(10, 40, top=25)
    found = changes(objects, all_of(objects[:seen] + lying_badly[seen:]), scale=scale)
    found = [change for change in found if "--tile" in change.change and change.gain > 0]
    assert len(found) == advised
    assert all("12 pixels" in c.evidence and "50%" in c.evidence for c in found)


def test_small_objects_want_a_larger_input_though_found_ones_have_loose_boxes_too():
    """As in a young run, whose large objects are found, with a second box that lies badly."""
    small, large = in_rows(20, 20), in_rows(20, 40, top=100)
    loose = [predicted(1, (50 * i, 125, 40, 40), 0.3) for i in range(20)]
    found = changes(small + large, all_of(small[:10] + large) + loose)
    assert ["of 20 larger ones: 0%." in c.evidence for c in found if "--size" in c.change] == [True]


@pytest.mark.parametrize(
    ("scale", "tile", "advised"),
    [
        (0.5, 0, "--size 128, or on tiles, by --tile auto:"),
        (0.8, 0, "--size 224:"),
        (1.6, 0, "--size 384:"),  # no larger than twice the images
        (1.0, 256, "--tile 128:"),
    ],
)
def test_how_objects_would_be_larger_depends_on_what_the_run_had(scale, tile, advised):
    tiny = [(1, 30 * i, 5, 8, 8) for i in range(10)]
    (change,) = changes(tiny, all_of(tiny[:5]), scale=scale, tile=tile)
    assert advised in change.change


def test_a_detector_that_is_not_usable_tells_nothing_about_annotations():
    """Its sure predictions of nothing, loose boxes and wrong classes are noise."""
    noise = [*NOISE, predicted(1, (100, 12, 40, 40)), predicted(2, (20, 10, 40, 40))]
    logged = [{"iteration": 19, "total_loss": 3.0}]
    (found,) = changes(OBJECTS, noise, logged)
    assert ap50(sort_errors(made_of(OBJECTS), noise, "bbox")[0], {1: 1, 2: 2}) < USABLE_AP50
    assert found.error == "training" and "first_batch.jpg" in found.change
    # of tiny objects that is said before
    first, second = changes(in_rows(10, 40), noise, logged, scale=TINY_INPUT)
    assert "--tile" in first.change and second.error == "training"
    # an evaluation alone is no training to be changed
    assert not of_error("training", changes(OBJECTS, noise))
    assert changes([], NOISE) == []  # a test set without objects


@pytest.mark.parametrize(("score", "are_named"), [(0.77, True), (0.78, False)])
def test_classes_are_named_that_the_matrix_confuses(score, are_named):
    nut = predicted(1, (100, 10, 40, 40), 0.77)
    found = changes(OBJECTS, [predicted(1, (10, 10, 40, 40), 0.99), nut], score=score)
    assert any("bolt and nut" in change.change for change in found) is are_named


def test_a_sure_prediction_of_another_class_doubts_the_annotation_and_is_no_pair():
    objects = [(1, 10, 10, 40, 40), *((2, 50 * i, 100, 40, 40) for i in range(4))]
    entries = [
        *all_of([objects[0], objects[4]]),
        predicted(1, (0, 100, 40, 40), 0.8),
        predicted(3, (1, 100, 40, 40), 0.7),  # of the nut whose annotation is in doubt
        predicted(3, (50, 100, 40, 40), 0.79),
        predicted(3, (100, 100, 40, 40), 0.4),
        predicted(3, (150, 100, 40, 40), 0.3),  # of a nut that is found
    ]
    truth = made_of(objects, ("bolt", "nut", "washer"))
    pairs, sure = of_error("class", advise(Evidence(truth, entries, "bbox", [], {}, score=0.5)))
    assert "annotations, first of 0.jpg;" in sure.change
    assert sure.evidence.endswith(" another class: 1.")
    assert pairs.change.endswith("that look alike: nut and washer.")
    assert ": 1 of a score of 0.5 or more, 3 of any," in pairs.evidence
    assert "Of the 3 objects in question 2 have no right prediction" in pairs.evidence
    assert pairs.gain > sure.gain > 0


def test_an_object_that_is_found_as_what_it_is_called_is_in_no_doubt():
    """Also where a prediction of another class is as sure: the two are confused."""
    entries = [*all_of(OBJECTS), predicted(1, (100, 10, 40, 40), 0.99)]
    (change,) = of_error("class", changes(OBJECTS, entries))
    assert "bolt and nut" in change.change


def test_of_how_many_objects_a_row_of_loose_boxes_tells():
    """One of 13 is 7.7 points, however many predictions lie badly."""
    objects = in_rows(13, 40)
    loose = [predicted(1, (50 * i, 25, 40, 40), 0.1) for i in range(3)]
    found = changes(objects, [*all_of(objects[1:]), *loose])
    (row,) = of_error("localisation", found)
    assert row.gain == pytest.approx(100 / 13, abs=0.5)
    assert "with an object: 3. " in row.evidence
    assert "Of the 3 objects in question 1 have no" in row.evidence


def test_errors_have_the_words_of_the_field():
    entries = [
        predicted(1, (10, 10, 40, 40), 0.99),
        predicted(1, (11, 10, 40, 40), 0.98),  # a duplicate
        predicted(1, (100, 10, 40, 40), 0.97),  # a nut
        predicted(2, (120, 100, 40, 40), 0.96),  # lies badly
        LACKING,  # nothing is there
    ]
    objects = [*OBJECTS, (1, 150, 150, 40, 40)]
    words = {"class", "localisation", "background", "missed"}
    found = changes(objects, entries, counts=(3, 100))
    assert {change.error for change in found} == words
    # a short run is told no more of these than their share
    found = changes(objects, entries, counts=(3, 100), epochs=Epochs(3, 30))
    assert {change.error for change in found} == words - {"missed"} | {"training"}
    assert "Train longer first" in of_error("localisation", found)[0].change
    assert not any("alike" in change.change for change in found)


@pytest.mark.parametrize("epochs", [Epochs(5, 30), Epochs(28, 30), None])
def test_a_run_whose_ap50_rises_is_to_go_on_first(epochs):
    """The loss of its first evaluation, in which next to nothing is detected, does not count."""
    values = zip((133, 266, 415), (54.5, 69.1, 76.6), (2.98, 3.63, 3.58), strict=True)
    metrics = [
        {"iteration": step, "bbox/AP50": ap, "validation/total_loss": loss}
        for step, ap, loss in values
    ]
    found = changes(OBJECTS, [*PERFECT, LACKING], metrics, epochs=epochs)
    longer = found[0]
    assert longer.error == "training" and math.isnan(longer.gain)
    if epochs is not None:
        assert longer.change.endswith("--output RUN --resume --epochs 30")


@pytest.mark.parametrize(("trained", "steps"), [(5, 1200), (15, 400), (30, 400)])
def test_a_training_whose_steps_are_given_is_to_have_more_of_them(trained, steps):
    """``--epochs`` would make a recipe of it, which refuses its other keys."""
    epochs = Epochs(trained, 30, 200)
    (longer,) = changes(OBJECTS, [*PERFECT, LACKING], rising(60, 70, 80), epochs=epochs)[:1]
    assert longer.change.endswith(f"--output RUN --resume SOLVER.MAX_ITER {steps}")


@pytest.mark.parametrize(
    ("epochs", "advised"), [(Epochs(3, 30), True), (Epochs(29, 30), False), (None, False)]
)
def test_a_short_run_of_one_evaluation_is_to_go_on(epochs, advised):
    found = changes(OBJECTS, PERFECT, rising(60), epochs=epochs)
    assert len(found) == advised
    assert all(change.change.endswith("--resume --epochs 30") for change in found)
    assert all("3 of 30 epochs" in change.evidence for change in found)


@pytest.mark.parametrize(
    ("side", "seen", "scale", "advised"),
    [
        (16, (2, 9), 1, True),
        (16, (6, 8), 1, False),  # 40 and 20 % of ten are no difference
        (16, (9, 2), 1, False),
        (16, (2, 9), 2.5, False),  # all are larger than SMALL in the network's input
        (10, (2, 9), 1.5, True),
        # A recipe gives images of 200 pixels an input of 384, and says that more show nothing new
        (10, (2, 9), 384 / 200, False),
    ],
)
def test_objects_that_are_missed_more_often_because_they_are_small_want_a_larger_input(
    side, seen, scale, advised
):
    small, large = in_rows(10, side), in_rows(10, 40, top=100)
    entries = all_of(small[: seen[0]] + large[: seen[1]])
    found = [c for c in changes(small + large, entries, scale=scale) if "larger size" in c.change]
    assert len(found) == advised
    if advised:
        assert "80%" in found[0].evidence and "10%" in found[0].evidence


def test_a_crowd_is_no_object_that_might_be_missed():
    small, large = in_rows(10, 16), in_rows(90, 40, top=100)
    truth = made_of(small + large)
    for entry in list(truth.anns.values())[20:]:
        entry["iscrowd"] = 1
    (change,) = advise(Evidence(truth, all_of(large[:10]), "bbox", [], {}))
    assert "of 10 larger" in change.evidence


@pytest.mark.parametrize(
    ("bolts", "epochs", "advised"),
    [
        (3, None, True),
        (99, None, True),
        (100, None, False),
        (3, Epochs(14, 30), False),  # it is short
        (3, Epochs(15, 30), True),
    ],
)
def test_the_class_with_few_examples_is_named(bolts, epochs, advised):
    found = changes(OBJECTS, PERFECT[1:], counts=(bolts, 100), epochs=epochs)
    found = of_error("missed", found)
    assert [c.change for c in found] == ["Add examples of bolt."] * advised
    assert all(f"({bolts} objects in training)" in c.evidence for c in found)


NAN = float("nan")


@pytest.mark.parametrize(
    ("ap", "gain"),
    [
        ((10, 20, 30, 40, 50, 60), NAN),  # 40 at two thirds of the steps
        ((10, 20, 60, 50, 50, 50), NAN),  # it was better before
        ((10, 20, 30, 40, 60, 50), NAN),
        ((80, 86, 85.8, 86.1, 86.3), None),  # by less than evaluations differ by chance
        ((80, 86, 85.1, 85.4, 87.5), None),  # only the last one is better than one before
        ((56, 57, 58, 58, 59, 60), NAN),
        ((10, 60), None),  # too few evaluations
        ((NAN, 10, 20, 30, 40), NAN),  # its first evaluation is without any prediction
        ((10, 20, 30, NAN), NAN),  # its last one is
        ((NAN, NAN, NAN), None),
        ((90, 97.6, 99.9), None),  # no AP50 is beyond 100
        ((90, 97.6, 100), None),
    ],
)
def test_a_run_that_was_still_rising_is_to_go_on(ap, gain):
    gains = [c.gain for c in changes(OBJECTS, PERFECT, rising(*ap))]
    assert gains == ([] if gain is None else [pytest.approx(gain, nan_ok=True)])


def rising(*values):
    return [{"iteration": 100 * i - 1, "bbox_EMA/AP50": ap} for i, ap in enumerate(values, 1)]


@pytest.mark.parametrize(
    ("ap", "told"),
    [
        ((75.9, 96.3, 98.4, 98.5), "since step 200 it rose from 96.3 to 98.5"),
        ((50, 60, 58, 59, 61, 63), "since step 200 it rose from 60.0 to 63.0"),
        ((50, 60, 58, 60, 61, 63), "since step 400 it rose from 60.0 to 63.0"),
    ],
)
def test_a_rise_is_told_with_the_step_from_which_it_counts(ap, told):
    (longer,) = changes(OBJECTS, PERFECT, rising(*ap))
    assert told in longer.evidence


def test_a_run_that_was_evaluated_only_late_tells_nothing():
    metrics = [{"iteration": 90 + i, "bbox/AP50": 10 * i} for i in range(5)]
    assert changes(OBJECTS, PERFECT, metrics) == []


TWENTY = [f"part {i}" for i in range(20)]


def of_twenty(confused=0, missed=(), counts=()):
    """Of 20 classes with 5 objects each, of which each of the first ``confused`` classes has one
    with the name of the next class, and of ``missed`` ones none is found."""
    objects = [(1 + c, 50 * n, 50 * c, 40, 40) for c in range(20) for n in range(5)]
    entries = [
        predicted(category + 1, box, 0.7)
        if category <= confused and place % 5 == 0
        else predicted(category, box)
        for place, (category, *box) in enumerate(objects)
        if category not in missed
    ]
    trained = dict(zip(TWENTY, counts or [400] * 20, strict=True))
    return Evidence(made_of(objects, TWENTY, (300, 1100)), entries, "bbox", [], trained)


def test_of_twenty_classes_those_that_are_missed_are_named_together():
    """Each counts a twentieth of AP, so alone none would stand out."""
    (change,) = advise(of_twenty(missed=range(1, 9), counts=[20] * 8 + [400] * 12))
    assert change.error == "missed" and change.gain == pytest.approx(40)
    assert "part 4 and 3 more" in change.change and "(20 objects in training)" in change.evidence


def test_of_twenty_classes_that_are_confused_all_count():
    evidence = of_twenty(confused=12)
    first, *_ = advise(evidence)
    assert first.error == "class" and "12 of any," in first.evidence
    assert first.gain == pytest.approx(100 - evidence.ap50)


def test_a_run_that_forgets_is_not_to_go_on_before_all_else():
    metrics = rising(60, 70, 72, 68, 66, 65)
    first, *others = changes(OBJECTS, [*PERFECT, LACKING], metrics)
    assert "not train longer" in first.change and math.isnan(first.gain)
    better = [line | {"bbox_EMA/AP": step} for step, line in enumerate(metrics)]
    found = changes(OBJECTS, [*PERFECT, LACKING], better)  # the last checkpoint is the best
    assert not any("not train longer" in change.change for change in found)
    assert "72.0 before" in first.evidence and others
    assert not any("Train longer" in change.change for change in others)
