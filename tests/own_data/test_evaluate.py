"""A trained detector on other data: its results are in a folder of their own, beside the run's."""

import errno
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from lambda_det import cli
from lambda_det.detection import lazy_parser, load_lazy_config
from lambda_det.detection.data.outputs import MARK, mark_output
from lambda_det.detection.task import DetectionTask
from lambda_det.errors import ConfigError, DataError, DiskError
from lambda_det.own_data.evaluate import ResultsOnData, evaluate
from lambda_det.own_data.held_out import part_of
from lambda_det.own_data.report.evaluated import RESULTS
from lambda_det.own_data.report.reading import EVALUATION, Result
from lambda_det.own_data.report.run_page import write_report
from lambda_det.training.run_folder import RunFolder
from tests.export.tiny import lambda_detector_config, save_lambda_run
from tests.own_data.parts import labelme, make, shape
from tests.reliability.runs import lazy_words
from tests.shapes import shapes_by_flag

STEPS = 40
AP = "bbox_EMA/AP"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory) -> dict[str, str]:
    return shapes_by_flag(tmp_path_factory.mktemp("shapes"), num_train=3, num_val=3, size=64)


def some_of(file, places):
    """The content of a file in COCO's format with the images at some places."""
    content = json.loads(Path(file).read_text())
    images = [content["images"][place] for place in places]
    return part_of(content, {image["id"] for image in images})


@pytest.fixture(scope="module")
def whole(shapes, tmp_path_factory) -> Path:
    """A run with averaged weights that was evaluated, on data with a part that it left alone."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    cfg = lambda_detector_config()
    cfg.MODEL.ROI_HEADS.SCORE_THRESH_TEST = 0.0
    cfg.DATASETS.update({key.upper(): value for key, value in shapes.items()})
    cfg.OUTPUT_DIR = str(folder)
    save_lambda_run(folder, cfg)
    task = DetectionTask(cfg)
    task.register_data()
    state = torch.load(folder / "model_final.pth")["model"]
    # The averaged weights find objects; to the others everything is background
    raw = {name: tensor.clone() for name, tensor in state.items()}
    raw["roi_heads.box_predictor.cls_score.bias"][-1] += 1000
    content = {"model": raw, "ema": {"model": state, "count": 1}, "iteration": STEPS - 1}
    content["trainer"] = {"loader": {"records": 3}, "of_a_step": {"images_per_step": 1}}
    torch.save({**content, **task.checkpoint_content({})}, folder / "model_final.pth")
    line = {"iteration": STEPS - 1, "bbox_EMA/AP": 12.5, "bbox/AP": 77.0}
    (folder / "metrics.json").write_text(json.dumps(line) + "\n")
    (folder / "data").mkdir()
    (folder / "data" / "rest.json").write_text(json.dumps(some_of(shapes["test_json"], [0, 1])))
    sources = {"rest": ["rest.json", shapes["test_images"]]}
    (folder / "data" / "sources.json").write_text(json.dumps(sources))
    return folder


@pytest.fixture
def run(whole, tmp_path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def found(folder: Path) -> list[dict]:
    return json.loads((folder / RESULTS).read_text())


def files(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "images", "trained_on"), [(None, 2, 0), ("val", 3, 0), ("train", 3, 3)]
)
def test_parts_of_the_run_s_data(run, part, images, trained_on):
    before = files(run)
    evaluated = evaluate(run, part=part)
    assert evaluated.images == images and evaluated.trained_on == trained_on
    assert evaluated.folder.parent == run / "evaluations"
    assert found(evaluated.folder / "inference_EMA")
    assert files(run).items() >= before.items()
    assert evaluated.own["bbox_EMA/AP"].value == 12.5 and "bbox/AP" not in evaluated.own
    assert {"bbox_EMA/AP", "segm_EMA/AP50"} <= evaluated.results.keys()
    assert [len(part.classes) for part in evaluated.classes] == [3, 3]
    for words in ("among those to train on", "--group-by"):
        assert (words in str(evaluated)) == bool(trained_on)


@pytest.mark.parametrize(
    ("change", "flags"),
    [
        (lambda content: content["annotations"][0]["bbox"].__setitem__(2, 1000.0), {}),
        (lambda content: content.pop("annotations"), {}),
        (lambda content: content["annotations"].clear(), {"data": "other"}),
        (lambda content: content["annotations"][0].update(iscrowd=1), {"labels": "other/a.json"}),
    ],
    ids=["a long box", "no annotations", "no objects", "a crowd"],
)
def test_labels_that_are_refused_are_named_and_not_their_copy(run, shapes, change, flags):
    """A test part is evaluated on for the first time when the training is over."""
    kept, other = run / "data" / "rest.json", run.parent / "other" / "a.json"
    content = json.loads(kept.read_text())
    del content["annotations"][1:]
    change(content)
    shutil.copytree(shapes["test_images"], other.parent)
    for file in (kept, other):
        file.write_text(json.dumps(content))
    with pytest.raises(DataError) as caught:
        evaluate(run, **{flag: str(run.parent / value) for flag, value in flags.items()})
    words = [str(other)] if flags else [str(kept), "--data"]
    assert all(word in str(caught.value) for word in words)
    copies = ("DATASETS", "/evaluations/", "lambda_det_")  # the last is of a temporary folder
    assert not any(word in str(caught.value) for word in copies)
    assert not (run / "evaluations").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "parts", "images", "trained_on"),
    [
        (None, ["train", "valid", "test"], 1, 0),
        ("val", ["train", "valid", "test"], 2, 0),
        (None, ["train", "valid"], 2, 0),
        ("train", ["train", "valid"], 3, 3),
        (None, ["train"], 3, 3),
        ("test", ["test"], 1, 0),  # its only folder
        (None, ["valid"], 2, 0),
    ],
)
def test_parts_of_other_data(run, shapes, tmp_path, part, parts, images, trained_on):
    """Copies of images of the run's data count as these; no part is needed to train on."""
    sources = {"train": ("train", [0, 1, 2]), "valid": ("test", [0, 1]), "test": ("test", [2])}
    for name in parts:
        source, kept = sources[name]
        content = some_of(shapes[f"{source}_json"], kept)
        folder = tmp_path / "other" / name
        folder.mkdir(parents=True)
        (folder / "_annotations.coco.json").write_text(json.dumps(content))
        for image in content["images"]:
            shutil.copy(Path(shapes[f"{source}_images"], image["file_name"]), folder)
    evaluated = evaluate(run, data=str(tmp_path / "other"), part=part)
    assert (evaluated.images, evaluated.trained_on) == (images, trained_on)


@pytest.mark.slow
def test_labels_without_a_list_of_classes_have_those_of_the_run(run, shapes, tmp_path):
    """They cannot show a class without an object; one that the run lacks refuses only its part."""
    other = tmp_path / "other"
    images = sorted(Path(shapes["test_images"]).iterdir())
    for image, part, name in zip(images, ("train", "val"), ("star", "triangle"), strict=False):
        outline = shape("polygon", [[4, 4], [40, 4], [20, 40]], name)
        labels = labelme(image.name, outline, imageWidth=64, imageHeight=64)
        make(other / part, {"a.json": labels, image.name: image.read_bytes()})
    for given in ({"data": str(other), "part": "val"}, {"labels": str(other / "val")}):
        evaluated = evaluate(run, **given)
        assert [part.objects for part in evaluated.classes[0].classes] == [0, 0, 1]
    with pytest.raises(DataError, match=r"train\S* has objects of star.*circle"):
        evaluate(run, data=str(other), part="train")


@pytest.mark.slow
def test_the_weights_that_are_asked_for(run):
    """The results of others, which were in the folder, are gone, and other folders stay."""
    first = evaluate(run)
    assert "averaged" in first.weights and found(first.folder / "inference_EMA")
    (first.folder / "inference_notes").mkdir()
    second = evaluate(run, raw=True, output=first.folder)
    assert first.folder == second.folder
    left = {path.name for path in second.folder.glob("inference*")}
    assert left == {"inference", "inference_notes"}
    assert second.own["bbox/AP"].value == 77.0
    assert "averaged" not in second.weights and not found(second.folder / "inference")


@pytest.mark.slow
def test_results_of_other_keys_or_weights_stay(run):
    """The same ones replace each other. The keys are in the first sentence, as on the page."""
    keys = ["TEST.DETECTIONS_PER_IMAGE", "3"]
    given = ({}, {"raw": True}, {"opts": keys}, {"opts": [keys[0], "4"]}, {"opts": keys})
    results = [evaluate(run, **options) for options in given]
    folders = [one.folder for one in results]
    assert len(set(folders)) == 4 and folders[4] == folders[2]
    assert folders[0].name.endswith(f"_step_{STEPS}")
    for number, one in enumerate(results):
        assert found(one.folder / ("inference" if number == 1 else "inference_EMA")) or number == 1
        assert ("with TEST.DETECTIONS_PER_IMAGE 3" in one.sentences()[0]) == (number in (2, 4))
    assert "with TEST.DETECTIONS_PER_IMAGE 3" in write_report(folders[4]).read_text("utf-8")
    torch.save(torch.load(run / "model_final.pth") | {"iteration": 9}, run / "model_0000009.pth")
    assert evaluate(run, checkpoint="10").folder not in folders


def test_an_interval_stands_beside_its_value():
    """In the column of the data that it is of."""
    here, own = Result(58.64, 48.9, 66.4), Result(44.1)
    shown = str(ResultsOnData(Path("there"), "best", "80 images", {AP: here}, {AP: own}, 0, 80, ()))
    head, _, row = shown.splitlines()[2:5]
    assert re.split(r"\s{2,}", row) == ["box AP", f"58.6{here.interval}", "44.1"]
    assert here.interval == " (48.9 to 66.4 by chance of the images)"
    assert row.index("44.1") == head.index("at the run's own evaluation (part val")


@pytest.mark.slow
def test_command_with_labels_of_another_format_and_page(run, shapes, tmp_path, capsys):
    words = [shapes["test_json"], str(tmp_path / "yolo"), "--images", shapes["test_images"]]
    assert cli.main(["convert", *words, "--format", "yolo"]) == 0
    words = ["--json", str(tmp_path / "yolo"), "--images", shapes["test_images"]]
    words += ["--output", str(tmp_path / "other")]
    assert cli.main(["evaluate", str(run), *words]) == 0
    assert cli.main(["report", str(tmp_path / "other")]) == 0
    text = capsys.readouterr().out
    assert "12.5" in text and "circle" in text
    page = (tmp_path / "other" / "report.html").read_text("utf-8")
    assert "Evaluation other" in page and "12.5" in page and "circle" in page
    assert "had 13.3 of 30 epochs" in page  # of the run's training: 40 steps on three images
    assert "evaluation of the averaged weights" in page


@pytest.mark.slow
def test_the_run_of_a_lazyconfig_is_evaluated_on_what_its_nodes_say(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    words = [*lazy_words(tmp_path), f"train.output_dir={run}"]
    task = DetectionTask(load_lazy_config(lazy_parser().parse_args(words)))
    content = {"model": task.build_model().state_dict(), "iteration": STEPS - 1}
    torch.save({**content, **task.checkpoint_content({})}, run / "model_final.pth")
    RunFolder(task.settings.output_dir).save_config(task.dump())
    evaluated = evaluate(run / "model_final.pth")
    assert evaluated.images == 2 and evaluated.trained_on is None
    assert evaluated.folder == run / "evaluations" / f"own_step_{STEPS}"
    with pytest.raises(ConfigError, match=r"dataloader\.test"):
        evaluate(run / "model_final.pth", data=str(tmp_path))


WITHOUT_TEST = ["DATASETS.TEST_JSON", "", "DATASETS.TEST_IMAGES", ""]


@pytest.mark.parametrize(
    ("options", "error", "named"),
    [
        ({"data": "a", "labels": "b"}, ConfigError, "--json"),
        ({"images": "a"}, ConfigError, "--images"),
        ({"labels": "nowhere.json"}, DataError, "nowhere.json"),
        ({"opts": WITHOUT_TEST, "part": "val"}, DataError, "no part val"),
        ({"part": "vla"}, DataError, "did you mean val"),
        ({"output": "RUN"}, ConfigError, "--output"),
    ],
)
def test_what_cannot_be(run, options, error, named):
    if "output" in options:
        options["output"] = run
    before = files(run)
    with pytest.raises(error, match=named):
        evaluate(run, **options)
    assert files(run) == before


def test_a_folder_with_other_files_is_left_as_it_is(run, tmp_path):
    other = tmp_path / "other"
    (other / "inference").mkdir(parents=True)
    (other / "inference" / "mine.txt").write_text("mine")
    (other / EVALUATION).write_text('{"mine": 1}')
    before = files(other)
    for output in (other, other / "inference" / "mine.txt"):
        with pytest.raises(ConfigError, match=str(output)):
            evaluate(run, output=output)
    assert files(other) == before


def test_a_full_disk_is_named_with_the_folder(run, monkeypatch):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(RunFolder, "save_config", fail)
    with pytest.raises(DiskError, match=f"{run}.*{os.strerror(errno.ENOSPC)}"):
        evaluate(run)


@pytest.mark.slow
def test_data_without_masks_have_box_ap_alone(run, shapes, tmp_path):
    """The same as with masks; a mask AP would be that of boxes."""
    content = json.loads(Path(shapes["test_json"]).read_text())
    for annotation in content["annotations"]:
        del annotation["segmentation"]
    (tmp_path / "boxes.json").write_text(json.dumps(content))
    boxes, masks = (
        evaluate(run, labels=str(labels), images=shapes["test_images"])
        for labels in (tmp_path / "boxes.json", shapes["test_json"])
    )
    assert boxes.results == {k: v for k, v in masks.results.items() if k.startswith("bbox")}
    assert [part.iou_type for part in boxes.classes] == ["bbox"] and len(masks.classes) == 2


def test_other_classes_are_refused(run, shapes, tmp_path, monkeypatch):
    """The results of an earlier evaluation stay, and a new folder has nothing in the end."""
    kept = []
    at_exit = SimpleNamespace(register=lambda *work: kept.append(work))
    monkeypatch.setattr("lambda_det.own_data.run_data.atexit", at_exit)
    content = json.loads(Path(shapes["test_json"]).read_text())
    content["categories"][0]["name"] = "plum"
    (tmp_path / "other.json").write_text(json.dumps(content))
    old = tmp_path / "old"
    mark_output(old)
    (old / "inference_EMA").mkdir()
    (old / "inference_EMA" / RESULTS).write_text("[]")
    (old / EVALUATION).write_text('{"sentences": [], "results": {}, "own": {}}')
    before = files(old)
    given = {"labels": str(tmp_path / "other.json"), "images": shapes["test_images"]}
    for output in (old, tmp_path / "new", tmp_path / "new"):
        with pytest.raises(DataError, match=r"of \S*other\.json differ .*: .* plum, .* circle;"):
            evaluate(run, **given, output=output)
    for take_back, *what in reversed(kept):
        take_back(*what)
    assert files(old) == before and os.listdir(tmp_path / "new") == [MARK]


@pytest.mark.slow
def test_training_data_that_are_gone(run):
    opts = ["DATASETS.TRAIN_JSON", "gone.json", "DATASETS.TRAIN_IMAGES", "gone"]
    (run / "data" / "sources.json").unlink()  # of a run without a test part
    evaluated = evaluate(run, part="val", opts=opts)
    assert (evaluated.folder / MARK).is_file()  # so no later reading takes it for data
    assert evaluated.trained_on is None and "cannot be seen" in str(evaluated)
