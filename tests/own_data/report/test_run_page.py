import dataclasses
import json
import re
from html.parser import HTMLParser

import numpy as np
import pycocotools.mask as mask_util
import pytest
import torch
from matplotlib.axes import Axes
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

import lambda_det
from lambda_det import get_config
from lambda_det.classification.config import get_classification_config
from lambda_det.detection import lazy_parser, load_lazy_config
from lambda_det.detection.results import columns
from lambda_det.detection.task import DetectionTask
from lambda_det.errors import ConfigError, DataError
from lambda_det.own_data.command_line import report_main as main
from lambda_det.own_data.report import figures, run_page
from lambda_det.own_data.report.class_results import evaluate_detections
from lambda_det.own_data.report.evaluated import RESULTS, evaluate_run
from lambda_det.own_data.report.page import Page, new_axes, to_figure, to_svg
from lambda_det.own_data.report.reading import RunState, label_of, results_of
from lambda_det.own_data.report.run_page import write_report
from lambda_det.training.run_folder import RunFolder
from tests.coco import CLASSES, make_ground_truth, noisy_results, predicted
from tests.shapes import make_shapes
from tests.training.tiny_detector import CONFIG, tiny_config


@pytest.fixture
def ground_truth():
    return make_ground_truth()


def log(folder, *lines):
    """The metrics of a run."""
    (folder / "metrics.json").write_text("".join(json.dumps(line) + "\n" for line in lines))


def edit(file, pattern, new):
    """Change a part of a text, which is there."""
    text, count = re.subn(pattern, new, file.read_text())
    assert count
    file.write_text(text)


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
        found = [result.values[head] for head in ("AP", "AP50", "small", "medium", "large")]
        for one, other in zip(found, expected, strict=True):
            assert one == pytest.approx(other) or (np.isnan(one) and other < 0)
        anns = ground_truth.dataset["annotations"]
        assert result.objects == sum(a["category_id"] == category for a in anns)


@pytest.mark.parametrize(("right", "score"), [(True, 0.0335), (False, 0.5)])
def test_the_confusion_of_a_young_run_is_at_its_best_score(ground_truth, right, score):
    entries = found_all(ground_truth.dataset, 0.01, bbox=[900, 900, 9, 9])
    entries += found_all(ground_truth.dataset, 0.057) if right else []
    detections = evaluate_detections(ground_truth, entries, "bbox")
    assert detections.score == pytest.approx(score)
    confusion = detections.confusion
    assert confusion[-1].sum() == 0
    assert confusion.trace() == (confusion.sum() if right else 0) and confusion.sum() > 0


@pytest.mark.slow
def test_what_a_page_shows_is_at_the_best_score_unless_one_is_given(run):
    edit(run / "inference" / RESULTS, "0.9}", "0.057}")
    for given, score in ((None, 0.057), (0.3, 0.3)):
        found = evaluate_run(run, score=given)
        assert found.score == score == found.results[0].score
        assert bool(found.results[0].confusion.trace()) is (given is None)


@pytest.mark.slow
def test_the_page_of_a_run_with_masks_counts_by_masks(run, shapes, monkeypatch):
    """With right masks and wrong boxes nothing is missed, and no error stands out."""
    ground_truth = COCO(shapes[0])
    entries = found_all(ground_truth.dataset, 0.057, bbox=[0, 0, 3, 3])
    for entry, annotation in zip(entries, ground_truth.dataset["annotations"], strict=True):
        mask = ground_truth.annToRLE(annotation)
        entry["segmentation"] = mask | {"counts": mask["counts"].decode()}
    (run / "inference" / RESULTS).write_text(json.dumps(entries))
    drawn = []
    monkeypatch.setattr(run_page, "draw_confusion", lambda of: drawn.append(of.confusion) or "")
    text = _page(run)
    assert "AP50 of masks is below" not in text
    assert drawn[0].sum() == drawn[0].trace() == len(entries)
    counts = re.findall(r"<figcaption>[^<]*?(\d+) found, (\d+) missed, (\d+) false<", text)
    assert {tuple(count[1:]) for count in counts} == {("0", "0")}
    assert sum(int(count[0]) for count in counts) == len(entries)
    assert text.count("by their masks, at an IoU") == 2 and "by their boxes" not in text
    assert "No kind of error stands out" in text and "score of 0.057 or more" in text


@pytest.mark.slow
def test_boxes_decide_while_masks_are_not_learnt(run, shapes, monkeypatch):
    """Each box is right, and no mask."""
    entries = found_all(json.loads(shapes[0].read_text()), 0.057)
    mask = mask_util.encode(np.eye(64, dtype=np.uint8, order="F"))
    for entry in entries:
        entry["segmentation"] = mask | {"counts": mask["counts"].decode()}
    (run / "inference" / RESULTS).write_text(json.dumps(entries))
    drawn = []
    monkeypatch.setattr(run_page, "draw_confusion", lambda of: drawn.append(of.confusion) or "")
    text = _page(run)
    assert drawn[0].sum() == drawn[0].trace() == len(entries)
    assert {" 0 missed, 0 false"} == set(re.findall(r"found,( \d+ missed, \d+ false)<", text))
    assert text.count("by their boxes, at an IoU") == 2 and "by their masks" not in text
    assert text.count("AP50 of masks is below") == 1 and "score of 0.057 or more" in text


def found_all(content, score, **more):
    """A prediction of each object of a file."""
    return [
        {key: a[key] for key in ("image_id", "category_id", "bbox")} | {"score": score, **more}
        for a in content["annotations"]
    ]


def test_confusion_counts_every_object_and_prediction_once():
    ground_truth = make_ground_truth(images=1)
    annotations = ground_truth.dataset["annotations"]
    for annotation, category in zip(annotations, (10, 20, 30, 10), strict=True):
        annotation["category_id"] = category
    annotations[3]["iscrowd"] = 1
    ground_truth.createIndex()
    boxes = [[float(v) for v in a["bbox"]] for a in annotations]
    results = [
        predicted(10, boxes[0], 0.9),  # right
        predicted(10, boxes[0], 0.8),  # the same again: nothing is left there
        predicted(30, boxes[1], 0.7),  # another class
        predicted(30, boxes[2], 0.2),  # below the score, so the object is missed
        predicted(10, boxes[3], 0.9),  # in a crowd: not counted
        predicted(20, [200.0, 200.0, 10.0, 10.0], 0.6),  # of nothing
    ]
    detections = evaluate_detections(ground_truth, results, "bbox", 0.5)
    assert [result.objects for result in detections.classes] == [1, 1, 1]
    expected = np.zeros((4, 4), int)
    expected[0, 0] = expected[1, 2] = expected[2, 3] = expected[3, 0] = expected[3, 1] = 1
    assert (detections.confusion == expected).all()


def test_sizes_of_masks_are_those_of_the_masks(ground_truth):
    """A mask smaller than 32² in a box larger than that is a small one."""
    for annotation in ground_truth.dataset["annotations"]:
        x, y, side, _ = annotation["bbox"]
        annotation["segmentation"] = [[x, y, x + side, y, x + side, y + 2, x + 2, y + side]]
        annotation["area"] = 100
    results = found_all(ground_truth.dataset, 0.9)
    for entry, annotation in zip(results, ground_truth.dataset["annotations"], strict=True):
        entry["segmentation"] = ground_truth.annToRLE(annotation)
    # Of the wrong image: false where the sizes of masks count, and ignored where those of boxes do
    results = [{**r, "image_id": 0, "bbox": [0, 0, 150, 150]} for r in results] + results
    without = [{k: v for k, v in r.items() if k != "bbox"} for r in results]
    found, expected = (
        evaluate_detections(ground_truth, r, "segm", 0.5).classes for r in (results, without)
    )
    for one, other in zip(found, expected, strict=True):
        assert one.values["small"] == other.values["small"] < 100


def test_shares_are_of_all_classes(ground_truth, monkeypatch):
    detections = evaluate_detections(ground_truth, noisy_results(ground_truth), "bbox", 0.5)
    confusion = np.array([[4, 0, 4, 2], [0, 6, 0, 0], [5, 1, 2, 0], [3, 1, 0, 0]])
    drawn = []
    monkeypatch.setattr(Axes, "imshow", lambda axes, share, **options: drawn.append(share))
    monkeypatch.setattr(figures, "CLASSES_CONFUSED", 1)
    figures.draw_confusion(dataclasses.replace(detections, confusion=confusion))
    np.testing.assert_allclose(drawn, [[[0.4, 0.2], [0.75, 0]]])


def test_names_of_classes_stay_words():
    figure, axes = new_axes(3, 2)
    axes.set_title("螺栓 $5 to $9")
    assert "螺栓 $5 to $9" in to_svg(figure, "names")


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


def _check(text):
    """It is whole, and fetches nothing."""
    check = _Check()
    check.feed(text)
    check.close()
    assert not check.open
    assert all(source.startswith(("#", "data:")) for source in check.sources)


def test_page_is_whole_and_fetches_nothing(ground_truth):
    detections = evaluate_detections(ground_truth, noisy_results(ground_truth), "bbox", 0.5)
    page = Page("a <run> & more", "where")
    page.table(
        ("class", *columns()), [(one.name, *one.values.values()) for one in detections.classes]
    )
    page.figures(figures.draw_confusion(detections))
    page.figures(to_figure(np.zeros((8, 8, 3), np.uint8), "a <picture>"))
    text = page.text()
    _check(text)
    assert "<script" not in text and "a &lt;run&gt; &amp; more" in text
    assert CLASSES[2] not in text and "&lt;b&gt;washer&lt;/b&gt;" in text
    assert not re.search(r"url\((?!#)", text)
    # curves become as narrow as a phone; a matrix of many classes is moved there
    (rule,) = re.findall(r"^\.figure svg \{(.*)\}$", text, re.M)
    assert "max-width: 100%; height: auto" in rule and text.count('class="figures"') == 2
    assert text.index(rule) < text.index(".scroll svg { max-width: none; }")  # the last rule counts
    assert ".scroll { overflow-x: auto; }" in text and text.count('class="figure scroll"') == 1
    for element in ("p", "figcaption"):  # in which there are paths
        (rule,) = re.findall(rf"^{element} \{{(.*)\}}$", text, re.M)
        assert "overflow-wrap: anywhere" in rule


@pytest.mark.parametrize(("title", "name"), [("total loss", "total_loss"), ("losses", "loss_cls")])
def test_a_loss_of_the_test_set_has_the_colour_of_the_training_s(title, name):
    metrics = [{"iteration": i, name: 2.0} for i in (19, 39)]
    axes = new_axes(4, 3)[1]
    assert figures.draw_panel(axes, title, metrics) and axes.get_title() == title
    metrics += [{"iteration": 39, f"validation/{name}": 3.0}]
    axes = new_axes(4, 3)[1]
    assert figures.draw_panel(axes, title, metrics) and "circles" in axes.get_title()
    trained, tested = sorted(axes.lines, key=lambda line: line.get_linestyle())
    assert (trained.get_linestyle(), tested.get_linestyle()) == ("-", "--")
    assert trained.get_color() == tested.get_color()
    # a single value is seen, and of which images it is
    assert tested.get_marker() == "o" and tested.get_markerfacecolor() == "none"
    axes = new_axes(4, 3)[1]
    assert figures.draw_panel(axes, title, metrics[:1]) and axes.lines[0].get_marker() == "o"
    assert [text.get_text() for text in axes.get_legend().texts] == [name]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """The annotations and images of a data set of three images."""
    root = tmp_path_factory.mktemp("data")
    make_shapes(root, num_train=1, num_val=3, size=64)
    return root / "shapes/annotations/instances_val.json", root / "shapes/val"


@pytest.fixture
def run(shapes, tmp_path):
    """The folder of an evaluated run that finds each object."""
    folder = tmp_path / "mine"
    cfg = tiny_config()
    cfg.DATASETS.TEST_JSON, cfg.DATASETS.TEST_IMAGES = map(str, shapes)
    cfg.OUTPUT_DIR, cfg.MODEL.FPN.OUT_CHANNELS = str(folder), 24
    folder.mkdir()
    base = tmp_path / "base.yaml"
    base.write_text(CONFIG)
    RunFolder(cfg.OUTPUT_DIR).save_config(cfg.dump(), str(base))
    log(folder, *({"iteration": i, "total_loss": 1.0, "time": 0.4} for i in (19, 39)))
    (folder / "last_checkpoint").write_text("model_0000039.pth")
    (folder / "inference").mkdir()
    results = found_all(json.loads(shapes[0].read_text()), 0.9)
    (folder / "inference" / RESULTS).write_text(json.dumps(results))
    return folder


def _page(run) -> str:
    text = write_report(run).read_text("utf-8")
    _check(text)
    return text


@pytest.mark.slow
def test_the_pictures_of_a_notebook(run):
    mine = lambda_det.Run(run)
    one, two = mine.plot_worst(1), mine.plot_worst(2)
    assert two.width == one.width and two.height > 1.9 * one.height
    curves = np.asarray(mine.plot_curves()).astype(int)
    assert (curves.max(2) - curves.min(2) > 100).sum() > 10  # lines are coloured
    with pytest.raises(ConfigError, match="0"):
        mine.plot_worst(0)
    with pytest.raises(DataError, match="first_batch"):
        print(mine.first_batch)
    (run / "metrics.json").unlink()
    with pytest.raises(DataError, match="no step"):
        mine.plot_curves()


@pytest.mark.slow
def test_a_page_is_as_dark_as_the_screen(run, ground_truth):
    """The black of a figure is the page's ink."""
    detections = evaluate_detections(ground_truth, noisy_results(ground_truth), "bbox", 0.5)
    metrics = [{"iteration": i, "total_loss": 1.0, "bbox/AP50": 5.0 * i} for i in (1, 2, 3)]
    drawn = [figures.draw_confusion(detections), *figures.draw_curves(metrics)]
    page = _page(run)
    assert "prefers-color-scheme: dark" in page
    assert set(re.findall(r"var\((--\w+)\)", "".join(drawn))) == {"--ink"}
    for text in (*drawn, page):
        assert not re.search(r"(?:#000000|#ffffff|black|white)\b(?!-)", text)


@pytest.mark.slow
def test_report_of_a_run(run):
    text = _page(run)
    assert (text.count("<img"), text.count(">100.0</td>") >= 6) == (6, True)
    assert re.search(r"<figcaption>[^<]*\d found, 0 missed, 0 false<", text)
    assert "model_0000039.pth" in text and "trained weights" in text
    assert "<b>40</b><span>steps" in text and "<b>0.4</b><span>seconds a step" in text
    assert "base.yaml" in text and text.count("by their boxes, at an IoU") == 2
    assert "<b>3</b><span>images evaluated on<" in text
    assert text.count("the loss may rise while AP does") == 1


@pytest.mark.slow
def test_the_best_checkpoint_counts_and_an_early_stop_is_said(run):
    (run / "last_checkpoint").write_text("model_final.pth")
    for name, iteration in (("best", 49), ("final", 99)):
        torch.save({"model": {}, "iteration": iteration}, run / f"model_{name}.pth")
    log(run, *({"iteration": i, "bbox/AP": ap} for i, ap in ((49, 61.25), (99, 58.5))))
    text = _page(run)
    assert "model_best.pth (after 50 steps, raw weights)" in text and "<b>61.2</b>" in text
    assert "<b>100</b><span>steps" in text and "after 100 of 40,000 steps" in text
    assert text.count(str(run)) == 2, "in the heads of the window and of the page"
    assert text.count("after 50 steps") == text.count("last evaluation, after 100 steps") == 1
    log(run, {"iteration": 49, "bbox/AP": 61.25})
    assert "last evaluation, after" not in _page(run)


@pytest.mark.slow
@pytest.mark.parametrize("averaged", [False, True])
def test_the_first_number_is_that_of_the_weights_that_count(run, averaged):
    """The results of the other weights are in the curves only."""
    content = {"model": {}, "iteration": 99}
    if averaged:
        content["ema"] = {"model": {}}
    torch.save(content, run / "model_best.pth")
    line = {"iteration": 99, "total_loss": 1.0, "bbox/AP": 36.1, "bbox_EMA/AP": 35.7}
    line |= {"bbox_EMA/AP_low": 29.04, "bbox_EMA/AP_high": 42.1}
    log(run, line)
    text = _page(run)
    numbers = re.findall(r"<b>([^<]*)</b><span>([^<]*)<", text)
    if averaged:
        assert numbers[0] == ("35.7", "box AP (29.0 to 42.1 by chance of the images)")
    else:
        assert numbers[0] == ("36.1", "box AP")
    assert sum("AP" in name for _, name in numbers) == 1


@pytest.mark.parametrize(
    ("line", "of_raw", "of_averaged"),
    [
        ({"bbox/AP": 1.0, "bbox_TTA/AP": 2.0}, "bbox bbox_TTA", "bbox bbox_TTA"),
        ({"bbox_EMA/AP": 1.0, "bbox_TTA/AP": 2.0}, "bbox_EMA bbox_TTA", "bbox_EMA bbox_TTA"),
        (
            {"bbox/AP": 1.0, "bbox_EMA/AP": 3.0, "bbox_TTA/AP": 2.0},
            "bbox",
            "bbox_EMA bbox_TTA",
        ),
    ],
)
def test_the_result_of_an_augmented_test_stands_beside_that_of_its_weights(
    line, of_raw, of_averaged
):
    for averaged, names in ((False, of_raw), (True, of_averaged)):
        found = results_of([{"iteration": 0, **line}], averaged)
        assert " ".join(name.partition("/")[0] for name in found) == names
    assert label_of("bbox_TTA/AP") == "box AP, augmented test"


@pytest.mark.slow
@pytest.mark.parametrize("size", [1024, 0])
def test_a_test_size_of_none_makes_no_object_small(run, size, monkeypatch):
    """And training data that are gone since take nothing of the page."""
    edit(run / "config.yaml", r"MIN_SIZE_TEST: \d+", f"MIN_SIZE_TEST: {size}")
    edit(run / "config.yaml", r"\n  TRAIN: .*", "\n  TRAIN: [coco_2017_train]")
    scales = []
    monkeypatch.setattr(run_page, "advise", lambda run: scales.append(run.scale) or [])
    assert "What would bring most" in _page(run)
    assert (scales[0] == 1) == (size == 0)


@pytest.mark.slow
def test_the_page_says_how_many_of_the_rule_s_epochs_there_were(run):
    file = run / "config.yaml"
    datasets = get_config(file).DATASETS
    for key in ("JSON", "IMAGES"):
        edit(file, rf"TRAIN_{key}: .*", f"TRAIN_{key}: {datasets[f'TEST_{key}']}")
    trainer = {"loader": {"records": 3}, "of_a_step": {"images_per_step": 1}}
    checkpoint = {"model": {}, "iteration": 39, "trainer": trainer}
    state = RunState([], 0, 300, "", None, False, 0, 0.0)
    assert state.sentences() == "It has not ended; it has no last checkpoint."
    torch.save(checkpoint, run / "model_0000039.pth")
    text = _page(run)
    assert "its last checkpoint is model_0000039.pth" in text and "of 30 epochs" not in text
    assert f"lambda-det train --output {run} --resume continues it" in text
    (run / "last_checkpoint").write_text("model_final.pth")
    torch.save(checkpoint, run / "model_final.pth")
    text = _page(run)
    assert "had 13.3 of 30 epochs" in text  # 40 steps on three images
    assert "continues it" not in text
    assert "<b>13.3</b><span>epochs<" in text and "<b>3</b><span>images to train on<" in text
    assert f"--output {run} --resume SOLVER.MAX_ITER 90" in text
    # the rate of a recipe for this batch, by which --epochs changes nothing but the length
    rate = 0.02 * min(1, (get_config(file).SOLVER.IMS_PER_BATCH / 4) ** 0.5)
    edit(file, r"BASE_LR: .*", f"BASE_LR: {rate}")
    assert f"--output {run} --resume --epochs 30" in _page(run)
    edit(file, r"KEEP: .*", "KEEP: [SOLVER.MAX_ITER]")
    assert f"--output {run} --resume SOLVER.MAX_ITER 90" in _page(run)
    trainer["of_a_step"]["images_per_step"] = 3
    torch.save(checkpoint, run / "model_final.pth")
    assert "of 30 epochs" not in _page(run)
    edit(file, r"IMS_PER_BATCH: \d+", "IMS_PER_BATCH: 1")
    torch.save({"model": {}, "iteration": 39}, run / "model_final.pth")  # as Detectron2 alone does
    assert "had 13.3 of 30 epochs" in _page(run)


@pytest.mark.slow
def test_what_the_log_warned_of_is_on_the_page(run):
    title = "What the log warned of"
    assert title not in _page(run)
    line = "[11/28 06:49:06] lambda_det.{} {}: {}\n"
    leaked = "14 of 40 pictures of <val> are also trained on"
    lines = [
        line.format("detection.data.checks", "WARNING", leaked),
        line.format("training.trainer", "INFO", "12 of 40 steps"),
        *(line.format("training.step", "WARNING", f"Step {i} is skipped") for i in (7, 81)),
    ]
    (run / "log.txt").write_text("".join(lines))
    text = _page(run)
    assert text.index(title) < text.index("<h2>Curves")
    rows = re.findall(r"<td[^>]*>(\d+)</td><td[^>]*>([^<]*)</td>", text)
    assert ("1", "14 of 40 pictures of &lt;val&gt; are also trained on") in rows
    assert ("2", "Step 7 is skipped") in rows
    assert "12 of 40 steps" not in text


def _added(**changes):
    """Results with an entry that has other values."""

    def change(text):
        entries = json.loads(text)
        return json.dumps([*entries, entries[0] | changes])

    return change


_FOUND = f"inference/{RESULTS}"
# A file of a run, what is done to its text (None: it is removed), what its page then says, and
# whether it stands under "What is missing"
CHANGED = {
    "saved and not logged": (
        "last_checkpoint",
        lambda text: "model_0000047.pth",
        "<b>48</b>",
        False,
    ),
    "no line yet": ("metrics.json", None, "no step", False),
    "no results": (_FOUND, None, RESULTS, True),
    "nothing found": (_FOUND, lambda text: "[]", "What would bring most", False),
    "cut short": (_FOUND, lambda text: text[:100], RESULTS, True),
    "other category": (_FOUND, _added(category_id=77), "category_id 77", True),
    "other images": (_FOUND, _added(image_id=999), "image_id 999", True),
    "moved data": (
        "config.yaml",
        lambda text: text.replace("instances_val.json", "moved.json"),
        "moved.json",
        True,
    ),
    "no instances": (
        "config.yaml",
        lambda text: text.replace(": GeneralizedRCNN", ": SemanticSegmentor"),
        "SemanticSegmentor",
        True,
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("row", CHANGED)
def test_what_a_run_lacks_stands_on_its_page(run, row, caplog):
    name, change, named, is_missing = CHANGED[row]
    if change:
        (run / name).write_text(change((run / name).read_text()))
    else:
        (run / name).unlink()
    text, _, missing = _page(run).partition("<h2>What is missing")
    assert bool(missing) == is_missing and named in (missing or text)
    assert not missing or named in caplog.text
    # An evaluation that is advised has to write what is missing
    assert ("--eval-only" in missing) == (row == "no results")


@pytest.mark.parametrize(
    ("options", "config", "named"),
    [
        ({"score": 1.5}, None, "1.5"),
        ({"dataset": "coco_2017_val"}, None, "coco_2017_val"),
        ({"output": "page.txt"}, None, r"page\.txt"),
        ({}, "- 1", r"config\.yaml"),
        ({}, "a: [", r"config\.yaml"),
    ],
)
def test_runs_and_options_that_cannot_be(run, options, config, named):
    if config:
        (run / "config.yaml").write_text(config)
    with pytest.raises((ConfigError, DataError), match=named):
        write_report(run, **options)
    with pytest.raises(DataError, match=r"config\.yaml"):
        write_report(run / "config.yaml")
    assert not list(run.rglob("report.html"))


@pytest.mark.slow
def test_runs_of_other_kinds(tmp_path):
    (tmp_path / "config.yaml").write_text(get_classification_config().dump())
    log(tmp_path, {"iteration": 9, "val/raw_top1": 12.5})
    assert "12.5" in _page(tmp_path)
    flags = ["--config-file", "mask_rcnn_lambdaresnet50.py"]
    lazy = DetectionTask(load_lazy_config(lazy_parser().parse_args(flags)))
    (tmp_path / "config.yaml").write_text(f"# --config-file /lost/mine.py\n{lazy.dump()}")
    assert "/lost/mine.py" in _page(tmp_path)


@pytest.mark.slow
def test_command(run, capsys):
    """Results of averaged weights come first."""
    (run / "inference").rename(run / "inference_EMA")
    assert main([str(run), "--pictures", "1"]) == 0
    assert str(run / "report.html") in capsys.readouterr().out
    assert "averaged weights" in (run / "report.html").read_text("utf-8")
    assert main([str(run), "--output", "/dev/null/page.html"]) == 2
    assert "/dev/null" in capsys.readouterr().err


def test_a_legend_of_long_names_leaves_the_axes_their_width():
    names = [f"{kind}_EMA/{name}" for kind in ("bbox", "segm") for name in ("AP", "AP50")]
    figure, axes = new_axes(5.2, 3.9)
    figures.draw_panel(
        axes, "AP or accuracy, percent", [{"iteration": 9, **dict.fromkeys(names, 1)}]
    )
    figure.draw_without_rendering()
    assert axes.get_position().width > 0.8
