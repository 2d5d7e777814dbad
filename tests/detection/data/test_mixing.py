"""Mosaic, copy-paste and colour, against images whose pixels are their labels."""

import itertools

import numpy as np
import pytest
import torch
from detectron2.structures import BitMasks, Boxes, Instances, PolygonMasks

from lambda_det.detection.data import Mixing, build_train_loader, tolerant_train_loader
from lambda_det.detection.data.registration import register_json_datasets
from lambda_det.errors import ConfigError


def labelled(number, size, *, masks="bitmask"):
    """An image whose pixels have the number of their object, in boxes of a grid, all even.

    Classes are the numbers. Below masks they are ellipses, for "polygon" rectangles.
    """
    rng = np.random.default_rng(number)
    height, width = size
    image = np.zeros(size, np.uint8)
    boxes, drawn, classes, polygons = [], [], [], []
    rows, columns = np.mgrid[:height, :width] + 0.5
    for top, left in itertools.product(range(0, height - 15, 16), range(0, width - 15, 16)):
        y, x = 2 * rng.integers(1, 4, 2) + (top, left)
        h, w = 2 * rng.integers(2, 5, 2)
        mask = np.zeros(size, bool)
        mask[y : y + h, x : x + w] = True
        if masks == "bitmask":
            mask &= ((rows - y - h / 2) / h) ** 2 + ((columns - x - w / 2) / w) ** 2 <= 0.25
        label = 50 * number + len(boxes) + 1
        image[mask] = label
        boxes.append([x, y, x + w, y + h])
        polygons.append([np.array([x, y, x + w, y, x + w, y + h, x, y + h], dtype=float)])
        drawn.append(mask)
        classes.append(label)
    objects = Instances(size, gt_boxes=Boxes(boxes), gt_classes=torch.tensor(classes))
    if masks == "bitmask":
        objects.gt_masks = BitMasks(torch.from_numpy(np.array(drawn)))
    elif masks == "polygon":
        objects.gt_masks = PolygonMasks(polygons)
    return {"image": torch.from_numpy(np.stack([image] * 3)), "instances": objects}


def mixed(sizes, seed=0, masks="bitmask", **options):
    """The first image, mixed with the others in turn."""
    first, *others = [labelled(n, size, masks=masks) for n, size in enumerate(sizes)]
    np.random.seed(seed), torch.manual_seed(seed)
    return Mixing(**options)(first, itertools.cycle(others or [first]).__next__)


def extent(mask):
    rows, columns = np.nonzero(mask)
    return [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]


def assert_as_painted(sample, *, with_masks=True):
    """Each label of the image is one object, with exactly its pixels and their box."""
    image, objects = sample["image"][0].numpy(), sample["instances"]
    assert objects.image_size == image.shape
    labels = sorted({*np.unique(image).tolist()} - {0, 128})
    assert sorted(objects.gt_classes.tolist()) == labels and labels
    for number, label in enumerate(objects.gt_classes.tolist()):
        seen = image == label
        if with_masks:
            np.testing.assert_array_equal(objects.gt_masks.tensor[number].numpy(), seen)
        assert objects.gt_boxes.tensor[number].tolist() == pytest.approx(extent(seen), abs=1e-4)


SIZES = [[(64, 48)] * 4, [(48, 64), (64, 64), (32, 40), (96, 32)], [(33, 40), (96, 96)]]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sizes", SIZES, ids=["equal", "different", "cropped"])
@pytest.mark.parametrize("masks", ["bitmask", "polygon"])
def test_what_is_pasted_covers_what_is_below(sizes, seed, masks):
    found = mixed(sizes, seed, masks, copy_paste=1.0)
    assert_as_painted(found)
    classes = found["instances"].gt_classes
    assert (classes < 50).any() and (classes > 50).any()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("sizes", SIZES, ids=["equal", "different", "cropped"])
@pytest.mark.parametrize("masks", ["bitmask", "polygon", ""])
def test_a_mosaic_of_unscaled_images(sizes, seed, masks, monkeypatch):
    uniform = np.random.uniform
    monkeypatch.setattr(np.random, "uniform", lambda a, b: 1.0 if b == 1 else uniform(a, b))
    # An ellipse that is cut has a smaller box than the cut of its box, so rectangles without masks
    assert_as_painted(mixed(sizes, seed, masks, mosaic=1.0), with_masks=bool(masks))


@pytest.mark.parametrize("masks", ["bitmask", "polygon", ""])
def test_a_mosaic_halves_objects(masks, monkeypatch):
    """Of four images of one size around the middle, each is whole at half of its size."""
    monkeypatch.setattr(np.random, "uniform", lambda low, high: 0.5)
    sizes = [(64, 48)] * 4
    found = mixed(sizes, masks=masks, mosaic=1.0)["instances"]
    given = [labelled(n, size, masks=masks)["instances"] for n, size in enumerate(sizes)]
    corners = torch.tensor([[0, 0], [24, 0], [0, 32], [24, 32]])  # x, y
    boxes = [o.gt_boxes.tensor / 2 + c.repeat(2) for o, c in zip(given, corners, strict=True)]
    torch.testing.assert_close(found.gt_boxes.tensor, torch.cat(boxes))
    assert found.gt_classes.tolist() == [c for o in given for c in o.gt_classes.tolist()]
    for box, mask in zip(found.gt_boxes.tensor.int(), found.gt_masks, strict=True) if masks else ():
        x0, y0, x1, y1 = box.tolist()
        assert mask.any() and not mask.clone().index_fill_(0, torch.arange(y0, y1), False).any()
        if masks == "polygon":
            assert mask[y0:y1, x0:x1].all() and mask.sum() == (y1 - y0) * (x1 - x0)


def test_objects_that_are_not_cut_keep_their_boxes():
    """A box need not be that of the mask, such as one of an amodal annotation."""
    first, second = labelled(0, (64, 64)), labelled(1, (64, 64))
    first["instances"].gt_boxes.tensor += torch.tensor([-1, -1, 1, 1])
    np.random.seed(0)
    found = Mixing(copy_paste=1.0)(first, lambda: second)["instances"]
    image = first["instances"]
    kept = cut = 0
    for label, mask, box in zip(
        found.gt_classes, found.gt_masks.tensor, found.gt_boxes.tensor, strict=True
    ):
        if label < 50:
            same = image.gt_classes == label
            whole = bool((image.gt_masks.tensor[same][0] == mask).all())
            expected = image.gt_boxes.tensor[same][0].tolist() if whole else extent(mask.numpy())
            assert box.tolist() == expected
            kept, cut = kept + whole, cut + (not whole)
    assert kept and cut


def test_colour_is_that_of_the_picture_whatever_the_order_of_channels():
    pixels = torch.randint(0, 256, (3, 20, 30), dtype=torch.uint8)
    found = {}
    for order in ("BGR", "RGB"):
        sample = labelled(0, (20, 30))
        sample["image"] = pixels.flip(0) if order == "BGR" else pixels
        torch.manual_seed(4)
        found[order] = Mixing(color=0.4, image_format=order)(sample, None)["image"]
    assert found["BGR"].flip(0).equal(found["RGB"]) and not found["RGB"].equal(pixels)
    change = (found["RGB"].float() - pixels).abs().mean()
    assert 2 < change < 100 and found["RGB"].dtype == torch.uint8


# --------------------------------------------------------------------------------- configurations


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"INPUT.MOSAIC": 1.5}, r"INPUT.MOSAIC is 1.5"),
        ({"INPUT.COLOR": 0.5, "INPUT.FORMAT": "L"}, r"INPUT.FORMAT is L"),
        ({"INPUT.COPY_PASTE": 0.5, "MODEL.MASK_ON": False}, r"COPY_PASTE needs masks"),
        ({"INPUT.MOSAIC": 0.5, "MODEL.KEYPOINT_ON": True}, r"keypoints.*INPUT.MOSAIC"),
        (
            {"INPUT.COPY_PASTE": 0.5, "MODEL.META_ARCHITECTURE": "PanopticFPN"},
            r"semantic masks.*INPUT.COPY_PASTE",
        ),
    ],
)
def test_what_cannot_be_mixed_is_refused(cfg, settings, named):
    cfg.merge_from_list([word for item in settings.items() for word in item])
    with pytest.raises(ConfigError, match=named):
        Mixing.from_config(cfg)


def test_colour_works_for_keypoints_and_nothing_is_made_of_defaults(cfg):
    assert Mixing.from_config(cfg) is None
    cfg.INPUT.COLOR, cfg.MODEL.KEYPOINT_ON = 0.5, True
    assert Mixing.from_config(cfg).color == 0.5


def plain(sample):
    objects = sample["instances"]
    masks = objects.gt_masks
    masks = masks.tensor.tolist() if isinstance(masks, BitMasks) else str(masks.polygons)
    return sample["image"].tolist(), objects.gt_boxes.tensor.tolist(), masks


def read(loader, count, first=0):
    loader.begin(3, first)
    return [plain(sample) for batch in itertools.islice(loader, count) for sample in batch]


@pytest.mark.slow
def test_what_is_drawn_follows_from_seed_and_place(cfg, content, write):
    """The number of workers, a resume and an unreadable image change nothing else."""
    cfg.DATASETS.TRAIN_JSON, cfg.DATASETS.TRAIN_IMAGES = write(content)
    cfg.DATASETS.TEST_JSON, cfg.DATASETS.TEST_IMAGES = write(content)
    cfg.INPUT.LSJ.MIN_SCALE, cfg.INPUT.LSJ.MAX_SCALE = 0.9, 1.1
    cfg.INPUT.COLOR, cfg.INPUT.COPY_PASTE, cfg.INPUT.MOSAIC = 0.4, 0.5, 0.5
    register_json_datasets(cfg)
    expected = read(build_train_loader(cfg, 2), 6)
    cfg.DATALOADER.NUM_WORKERS = 2
    loader = build_train_loader(cfg, 2)
    assert read(loader, 6) == expected and read(loader, 2, first=3) == expected[6:10]
    cfg.INPUT.MOSAIC = cfg.INPUT.COPY_PASTE = cfg.INPUT.COLOR = 0.0
    without = read(build_train_loader(cfg, 2), 6)
    assert sum(a[0] == b[0] for a, b in zip(without, expected, strict=True)) == 0


def test_the_loader_of_a_lazyconfig_takes_the_arguments_and_the_format_of_the_mapper():
    class Mapper:
        image_format = "RGB"

        def __call__(self, record):
            return labelled(record["number"], (32, 32), masks="")

    records = [{"number": n, "width": 32, "height": 32} for n in range(4)]
    loader = tolerant_train_loader(
        records, mapper=Mapper(), total_batch_size=1, mixing={"mosaic": 1}
    )
    found = [next(iter(loader))[0]["instances"].gt_classes // 50 for _ in range(4)]
    assert max(len(classes.unique()) for classes in found) > 1  # of several images
