"""Records of tiles against a slow reference: each object is drawn into the whole image."""

from unittest.mock import Mock

import numpy as np
import pycocotools.mask as mask_util
import pytest
from detectron2.structures import BoxMode
from PIL import Image

from lambda_det.detection.data import TolerantMapper, tile_pixels
from lambda_det.detection.data.tile_records import LEAST_LEFT, tile_records
from lambda_det.detection.data.truth import Decided, decided
from lambda_det.detection.tiles import Tiling
from lambda_det.errors import ConfigError, DataError
from tests.coco import true_box

WIDTH, HEIGHT = 150, 108
TILING = Tiling(size=60, overlap=12)


@pytest.fixture
def image(noise):
    return noise(HEIGHT, WIDTH)


def with_objects(record, *objects):
    return decided({**record, "annotations": [*objects]})[0]


def drawn_objects(rng, number, form):
    """Random ellipses with masks of a form, some of them larger than a tile."""
    angles = np.linspace(0, 2 * np.pi, 40, endpoint=False)
    circle = np.stack([np.cos(angles), np.sin(angles)], 1)
    objects = []
    for kind in range(number):
        middle, radii = rng.uniform(0, (WIDTH, HEIGHT)), rng.uniform(3, 50, 2)
        points = (middle + radii * circle).clip(0, [WIDTH, HEIGHT])
        mask, sides = [points.reshape(-1).tolist()], [*points.min(0), *np.ptp(points, 0)]
        if form == "runs":
            (mask,) = mask_util.frPyObjects(mask, HEIGHT, WIDTH)
            sides = mask_util.toBbox(mask).tolist()
        objects.append(true_box(*map(float, sides), category_id=kind, segmentation=mask))
    return objects


def pixels_of(mask, height, width):
    if isinstance(mask, list):
        mask = mask_util.merge(mask_util.frPyObjects(mask, height, width))
    return mask_util.decode(mask).astype(bool)


@pytest.mark.parametrize("form", ["runs", "polygons"])
def test_each_tile_has_the_part_of_each_object(image, form):
    rng = np.random.default_rng(1)
    for _ in range(8):
        record = with_objects(image, *drawn_objects(rng, 6, form))
        masks = [pixels_of(one["segmentation"], HEIGHT, WIDTH) for one in record["annotations"]]
        made = tile_records([record], TILING, empty=100.0)
        assert [one["tile"] for one in made] == TILING.tiles(HEIGHT, WIDTH)
        for number, whole in enumerate(masks):
            seen = [whole[t.y0 : t.y1, t.x0 : t.x1] for t in (one["tile"] for one in made)]
            areas = [
                np.prod(np.ptp(np.argwhere(part), axis=0) + 1) if part.any() else 0 for part in seen
            ]
            for of_tile, part, area in zip(made, seen, areas, strict=True):
                assert (of_tile["height"], of_tile["width"]) == part.shape
                found = [a for a in of_tile["annotations"] if a["category_id"] == number]
                share = area / max(areas)
                if abs(share - LEAST_LEFT) < 0.1 or 0 < part.sum() < 30:
                    continue  # half a pixel decides
                assert len(found) == (share >= LEAST_LEFT)
                for one in found:
                    drawn, places = pixels_of(one["segmentation"], *part.shape), np.argwhere(part)
                    edges = [*places.min(0)[::-1], *(places.max(0) + 1)[::-1]]
                    # a polygon that ends at the border is drawn half a pixel elsewhere
                    is_exact = form == "runs"
                    assert (drawn != part).sum() <= (0 if is_exact else 0.1 * part.sum() + 12)
                    np.testing.assert_allclose(one["bbox"], edges, atol=0 if is_exact else 1.5)


def test_an_object_that_is_whole_keeps_its_numbers(image):
    made = tile_records([with_objects(image, true_box(50.25, 3.5, 8.25, 5.0))], TILING, empty=0.0)
    assert [one["tile"][:2] for one in made] == [(0, 0), (48, 0)]
    for one, x0 in zip(made, (50.25, 2.25), strict=True):
        (annotation,) = one["annotations"]
        assert annotation["bbox_mode"] == BoxMode.XYXY_ABS
        assert annotation["bbox"] == [x0, 3.5, x0 + 8.25, 8.5]
        assert "segmentation" not in annotation
        assert isinstance(one["annotations"], Decided)


def test_little_that_is_left_is_ignored_and_crowds_stay(image):
    crowd = {"iscrowd": 1, "category_id": 1}
    objects = true_box(46, 5, 20, 10), true_box(46, 30, 20, 10, **crowd)
    first, _ = tile_records([with_objects(image, *objects)], TILING, empty=0.0)
    # the first tile ends at 60, and shows 14 of 20 columns; the second begins at 48
    assert [a["iscrowd"] for a in first["annotations"]] == [0, 1]
    narrow = tile_records([with_objects(image, true_box(55, 5, 20, 10))], TILING, empty=100.0)
    assert narrow[0]["tile"][:2] == (0, 0) and not narrow[0]["annotations"]
    assert narrow[0]["ignored"] == [[55, 5, 60, 15]]
    objects = true_box(5, 30, 9, 9), true_box(55, 5, 20, 10, **crowd)
    (tile,) = tile_records([with_objects(image, *objects)], TILING, empty=0.0)
    assert [a["iscrowd"] for a in tile["annotations"]] == [0, 1]
    assert not tile["ignored"]


def test_tiles_without_objects_are_a_share_of_those_with(image):
    records = [with_objects(image, true_box(5, 5, 10, 10), true_box(130, 90, 10, 10))] * 5
    made = tile_records(records, TILING, empty=0.5)
    empty = [one for one in made if not one["annotations"]]
    assert (len(made), len(empty)) == (15, 5)
    assert len({one["tile"] for one in empty}) > 1
    assert made == tile_records(records, TILING, empty=0.5)
    assert len(tile_records(records, TILING, 1e9)) == 5 * len(TILING.tiles(HEIGHT, WIDTH))


def test_images_that_are_not_larger_than_a_tile_stay(image):
    records = [with_objects(image, true_box(5, 5, 10, 10)), with_objects(image)]
    large = Tiling(size=WIDTH, overlap=0)
    assert tile_records(records, large, empty=0.0) == records


def test_tiles_that_are_smaller_than_the_objects_are_named(image, caplog):
    large, small = true_box(5, 5, 100, 80), [true_box(5, 5, 9, 9)] * 5
    made = tile_records([with_objects(image, large, large, *small)], TILING, empty=0.0)
    assert "2 of 7 objects (29%)" in caplog.text
    # its parts are learnt, as prediction joins them again
    assert sum(len(one["annotations"]) > 0 for one in made) > 3
    caplog.clear()
    tile_records([with_objects(image, large, *small, *small)], TILING, empty=0.0)
    assert "objects (" not in caplog.text


def test_what_cannot_be_cut_is_refused(image, mapper):
    with pytest.raises(ConfigError, match=r"INPUT\.TILE\.EMPTY"):
        tile_records([image], TILING, empty=-1.0)
    turned = {**true_box(0, 0, 1, 1), "bbox": [20, 20, 9, 9, 30], "bbox_mode": BoxMode.XYWHA_ABS}
    with pytest.raises(ConfigError, match="XYWHA_ABS"):
        tile_records([{**image, "annotations": Decided([turned])}], TILING, empty=0.0)
    taller = with_objects({**image, "height": HEIGHT + 1}, true_box(5, 5, 9, 9))
    with pytest.raises(DataError, match=f"{WIDTH}x{HEIGHT} .*{WIDTH}x{HEIGHT + 1}"):
        mapper()(tile_records([taller], TILING, empty=0.0)[0])


# --------------------------------------------------------------------------------------- the pixels
@pytest.fixture
def mapper(cfg):
    """A mapper that changes no pixel."""
    cfg.INPUT.RANDOM_FLIP = "none"
    cfg.INPUT.LSJ.ENABLED = False
    cfg.INPUT.MIN_SIZE_TRAIN, cfg.INPUT.MAX_SIZE_TRAIN = (TILING.size,), TILING.size
    return lambda **changes: TolerantMapper(
        **{**TolerantMapper.from_config(cfg, is_train=True), **changes}
    )


@pytest.mark.parametrize("exact", [True, False])
def test_a_tile_has_the_pixels_of_its_place(image, mapper, exact):
    pixels = np.asarray(Image.open(image["file_name"]))[:, :, ::-1]
    record = with_objects(image, true_box(57, 5, 20, 10), true_box(40, 8, 18.5, 4))
    mapped = mapper(exact_pixels=exact)
    for one in tile_records([record], TILING, empty=100.0):
        sample = mapped(one)
        x0, y0, x1, y1 = one["tile"]
        expected = pixels[y0:y1, x0:x1].copy()
        if (x0, y0) == (0, 0):
            expected[5:15, 57:60] = 128
            expected[8:12, 57:59] = pixels[8:12, 57:59]  # of the object that is learnt
        assert (sample["image"].permute(1, 2, 0).numpy() == expected).all()
        learnt = [a["bbox"] for a in one["annotations"]]
        assert sample["instances"].gt_boxes.tensor.tolist() == learnt


def test_an_image_is_decoded_once_for_its_tiles(image, mapper, monkeypatch):
    read = Mock(wraps=tile_pixels.read_pixels)
    monkeypatch.setattr(tile_pixels, "read_pixels", read)
    monkeypatch.setattr(tile_pixels, "KEPT", 2 * 3 * WIDTH * HEIGHT)  # of two images
    records, mapped = [], mapper()
    for number in range(3):
        path = image["file_name"].replace(".png", f"{number}.png")
        Image.open(image["file_name"]).save(path)
        one = with_objects({**image, "file_name": path}, true_box(5, 5, 9, 9))
        records += tile_records([one], TILING, 100.0)
    first, middle, last = records[0], records[len(records) // 2], records[-1]
    # The one that was used last is kept
    for some, expected in ((records, 3), ([last], 3), ([first], 4), ([last, middle, last], 5)):
        for one in some:
            mapped(one)
        assert read.call_count == expected
