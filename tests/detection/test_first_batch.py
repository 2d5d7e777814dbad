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
from tests.coco import found


@pytest.fixture(autouse=True)
def as_large_as_users_have_it(monkeypatch, first_batch_drawn_small):
    """In other tests it is small."""
    for name, value in first_batch_drawn_small.items():
        monkeypatch.setattr(first_batch, name, value)


class _Model(nn.Module):
    def forward(self, batch):
        return {}


def sample(colour, size=(60, 80), boxes=((20, 20, 60, 50),), **more):
    """An image of one colour, in the order of the channels of the model, with objects."""
    objects = Instances(size, gt_boxes=Boxes(torch.tensor(boxes).float()), **more)
    objects.gt_classes = torch.ones(len(boxes), dtype=torch.int64)
    image = torch.tensor(colour, dtype=torch.uint8)[:, None, None].expand(3, *size)
    return {"image": image, "instances": objects}


def trained(folder, *batches, image_format="BGR", start=0):
    hook, model = FirstBatch(str(folder), image_format, ["bolt", "nut"]), _Model()
    hook.trainer = SimpleNamespace(start_iter=start, model=model)
    hook.before_train()
    for batch in batches:
        model(batch)
    assert not model._forward_pre_hooks
    return cv2.imread(str(folder / FILE)) if (folder / FILE).exists() else None


CAPTION = 26  # pixels above each image


@pytest.mark.parametrize("image_format", ["BGR", "RGB"])
def test_the_first_batch_is_drawn_with_its_objects(tmp_path, image_format):
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    batch = [sample(colour) for colour in colours]
    batch[1]["instances"].gt_masks = BitMasks(torch.ones(1, 60, 80, dtype=torch.bool))
    picture = trained(tmp_path, batch, [sample((9, 9, 9))] * 2, image_format=image_format)
    assert picture.shape == (CAPTION + 60 + 26, 3 * 80, 3)
    picture = picture[CAPTION:].astype(int)
    for place, colour in enumerate(colours):
        shown = picture[5, 80 * place + 5]
        expected = colour if image_format == "BGR" else colour[::-1]
        if place != 1:  # which has a mask over all of it
            assert np.abs(shown - expected).max() < 30
        edge = picture[23:47, 80 * place + 18 : 80 * place + 23]
        assert (np.abs(edge - shown).max(-1) > 60).any(1).all()


def test_of_a_large_input_a_part_is_drawn_in_its_own_pixels(tmp_path):
    """That part in which most objects are."""
    boxes = [[10, 10, 20, 20], [1100, 700, 1110, 710], [1200, 800, 1210, 810]]
    picture = trained(tmp_path, [sample((9, 9, 9), (1000, 1400), boxes)])[CAPTION:-26]
    assert picture.shape == (512, 512, 3)
    rows, columns = np.nonzero((picture > 90).any(2))
    # two boxes at a distance of 100 pixels, with the outlines of their lines
    assert 105 <= np.ptp(rows) <= 125 and 105 <= np.ptp(columns) <= 125


def test_tiles_and_what_they_ignore_are_marked(tmp_path, monkeypatch):
    captions = []
    monkeypatch.setattr(drawing, "captioned", lambda p, text: captions.append(text) or p)
    whole = {
        **sample((9, 9, 9), size=(60, 600)),
        "file_name": "DSC_7125_JPG.rf." + "09e5" * 9 + ".jpg",
    }
    tile = {**sample((9, 9, 9)), "file_name": "a/photo.jpg", "tile": (320, 40, 400, 100)}
    trained(tmp_path, [whole, {**tile, "ignored": []}])
    first = ["DSC_7125_JPG.r...9e509e509e5.jpg, part of 600 x 60", "photo.jpg, tile at 320, 40"]
    assert captions == first
    trained(tmp_path, [whole, {**tile, "ignored": [[1.0, 1.0, 5.0, 5.0]]}])
    assert captions[2:] == [*first, first_batch._IGNORED]


def test_the_legend_has_the_colour_of_each_class_with_its_name():
    names = ["bolt", "$a$ 螺栓", "\udcf6", *["long name"] * 40]
    legend = drawing.draw_legend([0, 1, 2], names, 600)
    assert legend.shape == (26, 600, 3)
    image = np.full((60, 80, 3), 9, np.uint8)
    for place in range(3):
        patch = legend[13, place * 100 + 14].astype(int)
        box = drawing.draw_objects(image, np.array([[20, 20, 60, 50]]), [place])[20:51, 20:61]
        assert (np.abs(box - patch).max(-1) < 30).any()
        assert (legend[:, place * 100 + 26 : place * 100 + 99] < 90).any()  # the name
    assert drawing.draw_legend(range(43), names, 600).shape[0] > 26


@pytest.mark.parametrize(
    ("start", "batch"),
    [(7, [sample((1, 2, 3))]), (0, torch.zeros(2, 3)), (0, [{"image": torch.zeros(3, 9, 9)}])],
    ids=["resumed", "a tensor", "no instances"],
)
def test_nothing_is_drawn_of_other_batches(tmp_path, start, batch):
    assert trained(tmp_path, batch, start=start) is None and not list(tmp_path.iterdir())


@pytest.mark.parametrize("fault", ["no folder", "no boxes"])
def test_a_picture_that_cannot_be_drawn_stops_no_training(tmp_path, caplog, fault):
    batch = [sample((1, 2, 3))]
    if fault == "no boxes":
        batch[0]["instances"].remove("gt_boxes")
    trained(tmp_path / "missing" if fault == "no folder" else tmp_path, batch, batch)
    assert FILE in caplog.text and not list(tmp_path.iterdir())


def test_the_name_of_an_only_class_is_left_out(monkeypatch):
    labels = []
    monkeypatch.setattr(drawing, "draw_objects", lambda *args, **_: labels.append(args[3]))
    image, objects = np.zeros((9, 9, 3), np.uint8), found((9, 9), [[1, 1, 5, 5]], scores=[0.5])
    true = {"bbox": [1, 1, 5, 5], "bbox_mode": BoxMode.XYXY_ABS, "category_id": 0}
    for names in (["bolt"], ["bolt", "nut"]):
        drawing.draw_predictions(image, objects, names)
        drawing.draw_ground_truth(image, [true, true | {"iscrowd": 1}], names)
    assert labels == [["50%"], ["", "(crowd)"], ["bolt 50%"], ["bolt", "bolt (crowd)"]]


@pytest.mark.parametrize("times", [1, 2])
def test_many_images_fill_rows(tmp_path, times):
    """Two rows at most, which a screen shows."""
    batch = [sample((9, 9, 9), size=(40, 80)), *[sample((9, 9, 9), size=(80, 40))] * 5]
    picture, row = trained(tmp_path, batch * times), CAPTION + 80
    assert picture.shape == (2 * row + 26, 4 * 80, 3)
    is_grey = (np.abs(picture.astype(int) - 128) < 10).all(-1)
    assert is_grey[CAPTION + 70, 20] and is_grey[CAPTION + 20, 80 + 70]  # beside the images
    assert not is_grey[CAPTION + 5, 5] and not is_grey[CAPTION + 5, 80 + 5]
