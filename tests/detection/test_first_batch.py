"""The picture of a run's first batch."""

from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from detectron2.structures import BitMasks, Boxes, BoxMode, Instances
from torch import nn

from lambda_det.detection import drawing, first_batch
from lambda_det.detection.first_batch import FILE, FirstBatch


@pytest.fixture(autouse=True)
def as_large_as_users_have_it(monkeypatch, first_batch_drawn_small):
    """In other tests it is small."""
    for name, value in first_batch_drawn_small.items():
        monkeypatch.setattr(first_batch, name, value)


class _Model(nn.Module):
    def forward(self, batch):
        return {}


def sample(colour, size=(60, 80), masks=False):
    """An image of one colour, in the order of the channels of the model, with one object."""
    objects = Instances(size, gt_boxes=Boxes(torch.tensor([[20.0, 20.0, 60.0, 50.0]])))
    objects.gt_classes = torch.tensor([1])
    if masks:
        objects.gt_masks = BitMasks(torch.ones(1, *size, dtype=torch.bool))
    image = torch.tensor(colour, dtype=torch.uint8)[:, None, None].expand(3, *size)
    return {"image": image, "instances": objects}


def trained(folder, batches, image_format="BGR", start=0):
    hook, model = FirstBatch(str(folder), image_format, ["bolt", "nut"]), _Model()
    hook.trainer = SimpleNamespace(start_iter=start, model=model)
    hook.before_train()
    for batch in batches:
        model(batch)
    assert bool(model._forward_pre_hooks) == (not batches)
    return folder / FILE


@pytest.mark.parametrize("image_format", ["BGR", "RGB"])
def test_the_first_batch_is_drawn_with_its_objects(tmp_path, image_format):
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    batch = [sample(colour, masks=masks) for colour, masks in zip(colours, (0, 1, 0), strict=True)]
    other = [sample((9, 9, 9)) for _ in range(2)]
    picture = cv2.imread(str(trained(tmp_path, [batch, other], image_format)))
    assert picture.shape == (288, 3 * 384, 3)
    for place, colour in enumerate(colours):
        shown = picture[20, 384 * place + 20]
        expected = colour if image_format == "BGR" else colour[::-1]
        if place != 1:  # which has a mask over all of it
            assert np.abs(shown.astype(int) - expected).max() < 30
        edge = picture[110:220, 384 * place + 92 : 384 * place + 102].astype(int)
        assert (np.abs(edge - shown).max(-1) > 60).any(1).all()


@pytest.mark.parametrize(
    ("start", "batch"),
    [(7, [sample((1, 2, 3))]), (0, torch.zeros(2, 3)), (0, [{"image": torch.zeros(3, 9, 9)}])],
    ids=["resumed", "a tensor", "no instances"],
)
def test_nothing_is_drawn_of_other_batches(tmp_path, start, batch):
    hooked = FirstBatch(str(tmp_path), "BGR", None)
    model = _Model()
    hooked.trainer = SimpleNamespace(start_iter=start, model=model)
    hooked.before_train()
    model(batch)
    assert not list(tmp_path.iterdir())


def test_a_picture_that_cannot_be_drawn_stops_no_training(tmp_path, caplog):
    batch = [sample((1, 2, 3))]
    trained(tmp_path / "missing", [batch, batch])
    assert FILE in caplog.text
    wrong = sample((1, 2, 3))
    wrong["instances"].remove("gt_boxes")
    trained(tmp_path, [[wrong]])
    assert not list(tmp_path.iterdir())


def test_the_name_of_an_only_class_is_left_out(monkeypatch):
    labels, box = [], torch.tensor([[1.0, 1.0, 5.0, 5.0]])
    monkeypatch.setattr(drawing, "_draw", lambda *args: labels.append(args[3]))
    image, classes, scores = np.zeros((9, 9, 3), np.uint8), torch.tensor([0]), torch.tensor([0.5])
    fields = {"pred_boxes": Boxes(box), "pred_classes": classes, "scores": scores}
    annotation = {"bbox": box[0].tolist(), "bbox_mode": BoxMode.XYXY_ABS, "category_id": 0}
    for names in (["bolt"], ["bolt", "nut"]):
        drawing.draw_objects(image, box.numpy(), [0], names)
        drawing.draw_predictions(image, Instances((9, 9), **fields), names)
        drawing.draw_ground_truth(image, [annotation, annotation | {"iscrowd": 1}], names)
    assert labels[:3] == [[""], ["50%"], ["", "(crowd)"]]
    assert labels[3:] == [["bolt"], ["bolt 50%"], ["bolt", "bolt (crowd)"]]


def test_many_images_fill_rows(tmp_path):
    """Two rows at most, which a screen shows."""
    batch = [sample((9, 9, 9), size=(40, 80)), *[sample((9, 9, 9), size=(80, 40))] * 5]
    (tmp_path / "more").mkdir()
    picture = cv2.imread(str(trained(tmp_path / "more", [batch * 2])))
    assert picture.shape == (2 * 384, 4 * 384, 3)
    picture = cv2.imread(str(trained(tmp_path, [batch])))
    assert picture.shape == (2 * 384, 4 * 384, 3)
    is_grey = (np.abs(picture.astype(int) - 128) < 10).all(-1)
    for row, column in [(300, 100), (100, 384 + 300), (400, 2 * 384 + 10)]:  # beside the images
        assert is_grey[row, column]
    assert not is_grey[10, 10] and not is_grey[384 + 10, 10]
