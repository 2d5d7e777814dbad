import json

import cv2
import numpy as np
import pycocotools.mask as mask_util
import pytest
from detectron2.data import MetadataCatalog
from detectron2.data.datasets import register_coco_instances

from lambda_det.detection.drawing import captioned
from lambda_det.detection.evaluation import ground_truth_of
from lambda_det.errors import DataError
from lambda_det.own_data.report.class_results import Detections
from lambda_det.own_data.report.evaluated import Evaluated, read_predictions
from lambda_det.own_data.report.worst_images import draw_worst
from tests.coco import annotation, coco_content, predicted

BOXES = {10: [4, 6, 20, 16], 20: [30, 10, 24, 30], 30: [8, 8, 30, 30]}


def registered(folder, size, annotations, names=None):
    """The name of a data set of grey images, of the categories 3 and 7."""
    names = names or {one["image_id"]: f"{one['image_id']}.png" for one in annotations}
    for name in names.values():
        cv2.imwrite(str(folder / name), np.full((*size[::-1], 3), 90, np.uint8))
    content = coco_content(names, annotations, {3: "apple", 7: "pear"}, size)
    (folder / "truth.json").write_text(json.dumps(content))
    register_coco_instances("fruit", {}, str(folder / "truth.json"), str(folder))
    return "fruit"


def objects(**more):
    """Of three images, which have one each."""
    return [
        annotation(image, image, box, category_id=7 if image == 20 else 3, segmentation=[], **more)
        for image, box in BOXES.items()
    ]


@pytest.fixture
def data(tmp_path):
    return registered(tmp_path, (64, 48), objects())


def test_objects_are_those_that_were_decided(tmp_path):
    """One that lies outside of its image is left out of training and evaluation."""
    outside = annotation(99, 30, [90, 90, 5, 5], category_id=3, segmentation=[])
    registered(tmp_path, (64, 48), [*objects(), outside])
    pairs = drawn([entry(image, 3) for image in BOXES])
    assert [pair.name for pair in pairs] == ["20.png"]
    assert pairs[0].counts == "0 found, 1 missed, 1 false"


def entry(image, category, box=None, score=0.9, **more):
    return predicted(category, box or BOXES[image], score, image) | more


# 10 is found, 20 has the wrong class, 30 has a false one besides and one below the threshold
RESULTS = [
    entry(10, 3),
    entry(20, 3),
    entry(30, 3),
    entry(30, 3, [0, 0, 9, 9]),
    entry(20, 7, score=0.2),
]


def drawn(results, score=0.5, limit=20, iou_types=("bbox",)):
    judged = [Detections(iou_type, [], score, np.zeros((3, 3), int)) for iou_type in iou_types]
    evaluated = Evaluated(None, "fruit", "", ground_truth_of("fruit"), results, score, judged)
    return list(draw_worst(evaluated, limit))


def runs_of(box, size):
    """The run lengths of a filled box."""
    x, y, width, height = box
    mask = np.zeros(size, np.uint8, order="F")
    mask[y : y + height, x : x + width] = 1
    return mask_util.encode(mask)


@pytest.mark.parametrize(
    ("results", "options", "expected"),
    [
        (RESULTS, {}, ["20.png", "30.png"]),  # 10 has no error
        (RESULTS, {"limit": 1}, ["20.png"]),
        (RESULTS, {"score": 0.1}, ["20.png", "30.png"]),
        # Of two images of which nothing is found
        (
            [entry(10, 7), entry(20, 3), entry(20, 3, [0, 0, 9, 9]), entry(30, 3)],
            {"limit": 2},
            ["20.png", "10.png"],
        ),
        ([entry(10, 3), entry(20, 7), entry(30, 3)], {"limit": 2}, ["10.png", "20.png"]),
    ],
    ids=["all", "worst", "threshold", "most errors", "no error"],
)
def test_the_worst_come_first(data, results, options, expected):
    assert [pair.name for pair in drawn(results, **options)] == expected


@pytest.mark.parametrize(
    ("iou_types", "missed"),
    [(["bbox"], "10.png"), (["bbox", "segm"], "30.png")],
    ids=["boxes", "masks"],
)
def test_masks_decide_where_a_run_has_them(data, iou_types, missed):
    """Of 10 the mask is right and the box is too large, of 30 it is the other way round."""
    results = [
        entry(10, 3, [4, 6, 50, 30], segmentation=runs_of(BOXES[10], (48, 64))),
        entry(30, 3, segmentation=runs_of([8, 8, 10, 10], (48, 64))),
    ]
    counts = {pair.name: pair.counts for pair in drawn(results, iou_types=iou_types)}
    assert counts == {
        missed: "0 found, 1 missed, 1 false",
        "20.png": "0 found, 1 missed, 0 false",
    }


def test_predictions_are_drawn_where_the_file_says(data):
    box = [34, 20, 26, 20]
    wrong = entry(10, 7, box, segmentation=runs_of(box, (48, 64)))
    (pair,) = (pair for pair in drawn([wrong]) if pair.name == "10.png")
    covered = (pair.predicted != 90).any(2)  # at a scale of 8
    assert covered[22 * 8 : 38 * 8, 36 * 8 : 58 * 8].all() and not covered[:, : 32 * 8].any()
    truth = (pair.truth != 90).any(2)
    assert truth[10 * 8 : 20 * 8, : 40 * 8].any(1).all() and not truth[:, 40 * 8 :].any()  # edges


SPOT = [1510, 1210, 40, 30]


@pytest.mark.slow
@pytest.mark.parametrize("masks", ["none", "of the boxes", "empty"])
def test_of_a_large_image_the_part_around_its_errors_is_drawn(tmp_path, masks):
    """In a size in which names can be read; the masks of predictions are cut with it.

    The image has a bright object, and a found one far away.
    """
    boxes = [SPOT, [100, 100, 50, 50]]
    annotations = [annotation(1 + i, 1, box, category_id=3) for i, box in enumerate(boxes)]
    registered(tmp_path, (3000, 2000), annotations)
    picture = cv2.imread(str(tmp_path / "1.png"))
    x, y, width, height = SPOT
    picture[y : y + height, x : x + width] = 255
    cv2.imwrite(str(tmp_path / "1.png"), picture)
    results = [entry(1, 7, SPOT), entry(1, 3, [100, 100, 50, 50])]
    for one in results if masks != "none" else ():
        box = [0, 0, 0, 0] if masks == "empty" else one["bbox"]
        one["segmentation"] = runs_of(box, (2000, 3000))
    ((name, counts, *pictures),) = drawn(results)
    assert name == "1.png"
    assert counts == "1 found, 1 missed, 1 false; this is the part with most errors"  # of all of it
    for picture in pictures:
        assert picture.shape == (512, 512, 3)
        marked = (np.abs(picture.astype(int) - 90) > 20).any(2)
        rows, columns = np.nonzero(marked)
        assert marked[250:262, 245:267].any()  # the object is in the middle
        assert (np.ptp(picture.astype(int), axis=2) > 40).any()  # with its box in a colour
        assert rows.min() > 180 and rows.max() < 320 and columns.min() > 180


@pytest.mark.parametrize(("side", "is_enlarged"), [(16, True), (40, False)])
def test_small_objects_of_a_small_image_are_enlarged(tmp_path, side, is_enlarged):
    """Two that are missed, and one far away; large ones are seen in the whole image."""
    boxes = [[300, 200, side, side], [350, 240, side, side], [20, 20, side, side]]
    annotations = [annotation(1 + i, 1, box, category_id=3) for i, box in enumerate(boxes)]
    registered(tmp_path, (640, 480), annotations)
    (pair,) = drawn([])
    assert ("part" in pair.counts) == is_enlarged
    rows, columns = np.nonzero((pair.truth != 90).any(2))
    # from the first box to the second, or from the third
    drawn_side = np.ptp(columns)
    assert 150 < drawn_side < 230 if is_enlarged else 290 < drawn_side < 310
    assert rows.min() > 100 if is_enlarged else rows.min() < 20


def test_the_place_of_an_error_without_a_size_is_drawn(tmp_path):
    registered(tmp_path, (640, 480), [annotation(1, 1, [20, 20, 200, 90], category_id=3)])
    image = np.full((480, 640, 3), 90, np.uint8)
    image[180:230, 280:330] = 200
    cv2.imwrite(str(tmp_path / "1.png"), image)
    (pair,) = drawn([entry(1, 3, [20, 20, 200, 90]), entry(1, 3, [300, 200, 0, 0])])
    assert pair.truth.shape == (512, 512, 3) and (pair.truth == 200).mean() > 0.4


def test_keypoints_are_drawn_on_both_sides(tmp_path):
    points = [20, 40, 2, 50, 40, 2]
    data = registered(tmp_path, (64, 48), objects(keypoints=points, num_keypoints=2))
    rules = [("a", "b", (0, 255, 0))]
    MetadataCatalog.get(data).set(keypoint_names=["a", "b"], keypoint_connection_rules=rules)
    (pair,) = (one for one in drawn([entry(10, 7, keypoints=points)]) if one.name == "10.png")
    for picture in (pair.predicted, pair.truth):
        assert (picture[40 * 8, 22 * 8 : 48 * 8] != 90).any(1).all()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"a": 1}, "read"),
        ([{"image_id": 10}], "predictions"),
        ([{"image_id": 10, "category_id": 3, "score": 1}], "predictions"),
    ],
)
def test_other_files_are_refused(tmp_path, content, words):
    (tmp_path / "results.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=rf"results\.json.*{words}"):
        read_predictions(tmp_path / "results.json")


def test_missing_images_are_named(data, tmp_path):
    (tmp_path / "20.png").unlink()
    with pytest.raises(DataError, match=r"20\.png"):
        drawn(RESULTS)


def test_a_name_that_is_no_unicode_is_written_with_escapes():
    """OpenCV ends the process at such a text."""
    picture = np.full((20, 300, 3), 90, np.uint8)
    expected = captioned(picture, r"gr\udcf6n.png")
    assert np.array_equal(captioned(picture, "gr\udcf6n.png"), expected)
