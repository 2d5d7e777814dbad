"""AP of a file beside that of its run, and which of their instances belong together."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from detectron2.data.transforms import AugmentationList
from detectron2.structures import Boxes, Instances

from lambda_det.errors import Stage, UserError
from lambda_det.export.proof import Proof, prove, validation_images

ABOUT = {"outputs": ["boxes"], "input_format": "BGR", "min_size_test": 64}


def boxes_of_the_data(cfg, shift: float):
    """A detector that finds what the data have, and its file, which is ``shift`` pixels off."""
    content, seen = json.loads(Path(cfg.DATASETS.TEST_JSON).read_text()), []

    def instances(entry, shift=0.0):
        there = [a for a in content["annotations"] if a["image_id"] == seen[-1]]
        boxes = torch.tensor([a["bbox"] for a in there]).float()
        boxes[:, 2:] += boxes[:, :2]
        result = Instances((entry["height"], entry["width"]), pred_boxes=Boxes(boxes + shift))
        result.scores = torch.linspace(0.9, 0.5, len(there))
        result.pred_classes = torch.tensor([a["category_id"] - 1 for a in there])
        return [{"instances": result}]

    def run(inputs):
        seen.append(inputs[0]["image_id"])
        return instances(inputs[0])

    def file(inputs):
        return instances(inputs[0], shift)

    file.channels, file.resize, file.about, file.batch = "RGB", AugmentationList([]), ABOUT, 1
    return run, file


@pytest.mark.slow
@pytest.mark.parametrize("shift, passes", [(0.0, True), (0.1, True), (4.0, False)])
def test_ap_beside_ap(run, shift, passes, capsys):
    known = {"thing_classes": ["circle", "rectangle", "triangle"]}
    model, file = boxes_of_the_data(run.cfg, shift)
    opened = SimpleNamespace(config=run.cfg, classes=known, about=lambda: ABOUT)
    stage = Stage(partial(print, file=sys.stdout))  # as the command does
    proof = prove(validation_images(opened, 3), model, file, stage)
    (sentence,) = capsys.readouterr().out.splitlines()
    assert "3 images" in sentence and "seconds" in sentence and "--proof" in sentence
    assert proof.passed == passes and str(proof).startswith("3 images of ")
    assert bool(proof.alone) != passes  # small boxes that are shifted hardly overlap
    assert proof.differences == pytest.approx({"boxes": shift, "scores": 0.0}, abs=1e-5)
    of_run, of_file = proof.rows["bbox AP"]
    assert of_run == pytest.approx(100) and (of_file < 90) == (not passes)


def made(boxes, scores, classes) -> Instances:
    return Instances(
        (100, 100),
        pred_boxes=Boxes(torch.tensor(boxes).float()),
        scores=torch.tensor(scores),
        pred_classes=torch.tensor(classes),
    )


def test_instances_are_compared_by_class_and_place_and_not_by_rank():
    """Two of one class change their ranks, and one is found only by the run."""
    near, far, other = [0, 0, 20, 20], [60, 60, 90, 90], [0, 0, 20, 21]
    run = made([near, far, other], [0.90, 0.90, 0.4], [1, 1, 0])
    file = made([[60, 60, 90, 90.2], near], [0.91, 0.90], [1, 1])
    proof = Proof("")
    proof.add(run, file)
    assert proof.alone == 1
    assert proof.differences == pytest.approx({"boxes": 0.2, "scores": 0.01}, abs=1e-4)
    # one box of another class in its place is no pair
    proof = Proof("")
    proof.add(made([near], [0.9], [0]), made([near], [0.9], [1]))
    proof.add(made([], [], []), made([], [], []))
    assert proof.alone == 2 and not proof.differences


NO_FILES = ["DATASETS.TEST_JSON", "", "DATASETS.TEST_IMAGES", ""]


@pytest.mark.parametrize(
    "change, words",
    [([*NO_FILES, "DATASETS.TEST", ("coco_2017_val",)], "coco"), ([], "more to images")],
)
def test_without_images_the_reason_is_said(run, change, words):
    """Of others in test_command_line.py."""
    cfg = run.cfg.clone()
    cfg.merge_from_list(change)
    opened = SimpleNamespace(config=cfg, classes={}, about=lambda: {"outputs": ["boxes"]})
    with pytest.raises(UserError, match=words):
        validation_images(opened, 9)
