"""Each row of the table of results is where it says, and nowhere else."""

import math

import matplotlib.pyplot as plt
import pytest

from lambda_det.detection.results import METRICS
from lambda_det.detection.task import DetectionTask
from lambda_det.own_data.evaluate import ResultsOnData
from lambda_det.own_data.report.class_results import evaluate_detections
from lambda_det.own_data.report.figures import draw_panel
from lambda_det.own_data.report.reading import evaluations_of, label_of, results_of
from tests.coco import annotation, coco_content, indexed
from tests.training.tiny_detector import tiny_config

PREDICTIONS = {"/mIoU": "sem_seg", "/IoU": "sem_seg", "/PQ": "panoptic_seg", "_top1": "val/raw"}
# Of each class whose two objects are found, the second below a wrong prediction; percent, and NaN
# of the sizes that no object has
VALUES = {
    "AP": pytest.approx(83.5, abs=0.5),
    "AP50": pytest.approx(83.5, abs=0.5),
    "small": math.nan,
    "medium": pytest.approx(83.5, abs=0.5),
    "large": math.nan,
    "best score": 0.5,
    "precision": pytest.approx(2 / 3),
    "recall": 1.0,
}


@pytest.fixture(scope="module")
def task():
    return DetectionTask(tiny_config())


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.ending)
def test_a_result_is_where_its_row_says(task, metric, tmp_path):
    name = PREDICTIONS.get(metric.ending, "bbox") + metric.ending
    others = {"bbox/other": 7.0, name: 42.0}
    shown = task.describe({**others, "validation/total_loss": 3.0})
    assert ("42" in shown) is metric.in_log and "3" in shown and "7" not in shown
    lines = [{"iteration": 9, **others}]
    label = label_of(name)
    expected = [{"step": 10, label: 42.0}] if metric.is_drawn else []
    assert evaluations_of(lines) == expected
    axes = plt.figure().subplots()
    draw_panel(axes, "AP or accuracy, percent", lines)
    assert [line.get_label() for line in axes.lines] == [label] * metric.is_drawn
    plt.close(axes.figure)
    found = results_of(lines, False)
    shown = ResultsOnData(tmp_path, "", "", found, {}, None, 1, [])
    assert (label in str(shown)) is (label in shown.to_dict()) is metric.is_drawn
    if metric.ending.startswith("/"):
        best = {kind + metric.ending for kind in metric.best_of}
        assert {name for name in task.metrics if name.endswith(metric.ending)} == {
            one for name in best for one in (name, name.replace("/", "_EMA/"))
        }


def test_each_column_of_a_class_has_its_value():
    first, second, wrong = ([x, 0, 50, 50] for x in (0, 60, 400))
    objects = [annotation(1, 0, first), annotation(2, 0, second)]
    truth = indexed(coco_content({0: "0.png"}, objects, {1: "a"}, size=(500, 500)))
    results = [
        {"image_id": 0, "category_id": 1, "bbox": box, "score": score}
        for box, score in ((first, 0.9), (wrong, 0.7), (second, 0.5))
    ]
    [found] = evaluate_detections(truth, results, "bbox").classes
    assert found.values.keys() == VALUES.keys()
    for column, value in found.values.items():
        assert value == VALUES[column] or (math.isnan(value) and VALUES[column] is math.nan)
