import contextlib
import csv
import io
import json
import shutil
import signal
import tracemalloc
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from detectron2.structures import BoxMode
from pycocotools import mask as mask_util
from pycocotools.coco import COCO

from lambda_det.detection import drawing
from lambda_det.detection.data.label_files import polygons
from lambda_det.detection.drawing import draw_ground_truth, draw_predictions, side_by_side
from lambda_det.detection.prediction import Prediction, Predictor
from lambda_det.detection.prediction.annotations import Annotations
from lambda_det.detection.prediction.files import plan_dataset, plan_files, predict
from lambda_det.detection.prediction.tables import Tables
from lambda_det.errors import ConfigError, DataError
from lambda_det.files import SUFFIXES
from tests.coco import found
from tests.training.tiny_detector import tiny_config


@pytest.fixture(scope="module")
def predictor(run):
    return Predictor(run[1], score_threshold=0.0)


def instances(boxes, masks=True, height=48, width=64):
    scores = torch.linspace(0.9, 0.6, len(boxes))
    return found((height, width), boxes, torch.arange(len(boxes)) % 3, scores, masks)


# ---- drawing


def test_channels_keep_their_order():
    image = np.zeros((60, 80, 3), np.uint8)
    image[..., 0] = 200  # blue
    empty = instances([], height=60, width=80)
    for drawn in (draw_predictions(image, empty), draw_ground_truth(image, [])):
        assert (np.abs(drawn.astype(int) - image) <= 1).all()


def test_names_and_numbers_serve_as_labels_of_boxes_with_masks_and_without(image):
    draw_predictions(image, instances([[5, 5, 50, 40]]), ["$\\frac$ \x1b\n", "b"])  # no formula
    for masks in (True, False):
        found = instances([[5, 5, 50, 40]], masks=masks)
        named = draw_predictions(image, found, ["cat", "dog"])
        numbered = draw_predictions(image, found, None)
        for one, other in ((numbered, image), (named, numbered)):
            assert (np.abs(one.astype(int) - other).max(-1) > 40).any()


@pytest.mark.parametrize("scale", [1.0, 4.0])
def test_a_box_is_seen_on_any_colour_and_hides_no_small_object(scale):
    """Also where all pixels have the colour of its class."""
    small, large = [10, 10, 22, 22], [30, 10, 110, 70]
    found = instances([small, large], masks=False, height=80, width=120)
    found.pred_classes[:] = 0
    options = {"scale": scale, "with_labels": False}
    grey = draw_predictions(np.full((80, 120, 3), 128, np.uint8), found, **options)
    colours = [grey[round(40 * scale), round(30 * scale)], *([v] * 3 for v in (0, 128, 255))]
    for colour in colours:
        image = np.empty((80, 120, 3), np.uint8)
        image[:] = colour
        drawn = draw_predictions(image, found, **options)
        changed = np.abs(drawn.astype(int) - image[0, 0]).max(-1) > 60
        for x0, y0, x1, y1 in (np.array(box) * scale for box in (small, large)):
            for edge in (x0, x1):
                columns = slice(int(edge - 2 * scale), int(edge + 2 * scale) + 1)
                assert changed[int(y0 + 2) : int(y1 - 2), columns].any(1).all()
        inside = changed[
            round(13 * scale) : round(19 * scale), round(13 * scale) : round(19 * scale)
        ]
        assert not inside.any()


def test_a_smaller_image_is_that_of_a_smaller_image():
    """Half of one whose boxes, masks and keypoints have twice the coordinates."""
    small = instances([[10, 10, 30, 40], [50, 20, 70, 60]], height=100, width=120)
    large = instances([[20, 20, 60, 80], [100, 40, 140, 120]], height=200, width=240)
    points = torch.tensor([[[15.0, 20.0, 1.0]], [[60.0, 40.0, 1.0]]])
    small.pred_keypoints, large.pred_keypoints = points, points * torch.tensor([2.0, 2.0, 1.0])
    image = np.zeros((200, 240, 3), np.uint8)
    image[:, 120:] = 200
    expected = draw_predictions(image[::2, ::2], small)
    found = draw_predictions(image, large, scale=0.5)
    assert found.shape == (100, 120, 3)
    assert (np.abs(found.astype(int) - expected) > 30).mean() < 0.01
    assert (np.abs(found.astype(int) - image[::2, ::2]) > 30).mean() > 0.1


def test_labels_do_not_cover_each_other(monkeypatch):
    """Those of boxes at one place and near another are moved a little, or left out."""
    drawn = []
    real = drawing._spread
    monkeypatch.setattr(drawing, "_spread", lambda texts: (real(texts), drawn.extend(texts)))
    boxes = [[100, 100, 160, 160], [102, 100, 162, 160], [100, 112, 150, 150], [300, 200, 340, 240]]
    picture = np.zeros((300, 400, 3), np.uint8)
    draw_predictions(picture, instances(boxes * 4, height=300, width=400), ["a", "bcd", "e"])
    shown = [text.get_window_extent() for text in drawn if text.get_visible()]
    assert 8 <= len(shown) < len(drawn) == 16
    pairs = [(a, b) for place, a in enumerate(shown) for b in shown[:place]]
    assert not any(a.overlaps(b) for a, b in pairs)
    assert all(text.figure.bbox.contains(*text.get_window_extent().min) for text in drawn)


def test_without_labels_nothing_is_written_beside_the_boxes():
    image = np.full((200, 300, 3), 128, np.uint8)
    found = instances([[100, 100, 200, 180]], masks=False, height=200, width=300)
    beside = [
        np.abs(draw_predictions(image, found, ["cat"], with_labels=w).astype(int) - 128).max(-1) > 9
        for w in (True, False)
    ]
    labelled, plain = (there[104:176, 104:196].any() for there in beside)
    assert labelled and not plain


@pytest.mark.parametrize(
    "mask",
    [
        {"segmentation": [[10, 10, 40, 10, 40, 30, 10, 30]]},
        {"segmentation": {"size": [48, 64], "counts": [490, 20, *[28, 20] * 29, 1162]}},
        {"segmentation": []},
        {},
    ],
)
def test_the_truth_is_drawn_in_all_forms_of_segmentation(mask):
    image = np.full((48, 64, 3), 128, np.uint8)
    annotation = {"bbox": [10, 10, 30, 20], "bbox_mode": BoxMode.XYWH_ABS, "category_id": 1, **mask}
    other = {**annotation, "bbox": [50, 30, 10, 10], "segmentation": [[50, 30, 60, 30, 60, 40]]}
    drawn = draw_ground_truth(image, [annotation, other], ["a", "b"], scale=4)
    assert drawn.shape == (192, 256, 3)
    inside = np.abs(drawn[80:112, 90:150].astype(int) - 128).max(-1) > 10
    assert inside.mean() > 0.95
    assert not (np.abs(drawn[150:, :120].astype(int) - 128) > 10).any()
    alone = draw_ground_truth(image, [annotation], scale=4)[80:112, 90:150]
    assert (np.abs(alone.astype(int) - 128) > 10).any() == any(mask.values())  # no mask, no filling


def test_prediction_stands_left_of_the_truth_in_the_colour_of_its_class():
    image = np.full((512, 512, 3), 128, np.uint8)
    # The other way round in the truth: the colour does not follow the order
    found = instances([[100, 100, 200, 200], [300, 300, 400, 400]], height=512, width=512)
    found.pred_classes = torch.tensor([2, 1])
    truth = [
        {"bbox": [x, x, 100, 100], "bbox_mode": BoxMode.XYWH_ABS, "category_id": category}
        for x, category in ((400, 3), (300, 1), (100, 2))
    ]
    truth[0]["segmentation"] = [[400, 400, 500, 400, 500, 500, 400, 500]]  # a mask for each, then
    pair = side_by_side(image, found, truth, None, None)
    assert pair.shape == (512 + 26, 2 * 512 + 4, 3)
    left, right = pair[26:, :512], pair[26:, 516:]
    for x in (150, 350):
        assert np.abs(left[x, x].astype(int) - right[x, x]).max() <= 2
    assert np.abs(left[150, 150].astype(int) - left[350, 350]).max() > 20
    is_drawn = (
        np.abs(half[430:490, 430:490].astype(int) - 128).max(-1) > 10 for half in (left, right)
    )
    assert [half.mean() > 0.9 for half in is_drawn] == [False, True]


@pytest.mark.parametrize("size", [(427, 640), (601, 640), (640, 427), (640, 640)])
def test_both_halves_of_a_reduced_pair_have_one_size(size):
    """Detectron2 rounds the sides of its drawing down."""
    height, width = size
    image = np.full((*size, 3), 128, np.uint8)
    found = instances([[10, 10, 90, 90]], height=height, width=width)
    truth = [{"bbox": [10, 10, 80, 80], "bbox_mode": BoxMode.XYWH_ABS, "category_id": 0}]
    pair = side_by_side(image, found, truth, None, None, is_reduced=True)
    assert pair.shape[1] == 2 * int(512 / 640 * width + 1e-2) + 4


# ---- what goes where


@pytest.mark.parametrize("pattern", ["", "**/*.*[gp]"])
def test_folders_keep_their_order_and_foreign_formats_become_png(images, pattern):
    """Drawings of an earlier run, in a folder among the images, are no input."""
    output = images / "drawn"
    output.mkdir()
    shutil.copy(images / "a.png", output / "a.png")
    pictures = plan_files([images / pattern], output, overwrite=True)
    targets = [str(p.target.relative_to(output)) for p in pictures]
    assert targets == ["a.png", "b.jpg", "below/c.bmp.png"]
    assert [p.source.name for p in pictures] == ["a.png", "b.jpg", "c.bmp"]


@pytest.mark.parametrize(
    "inputs",
    [["a.png", "a.png"], ["", "a.png"], ["a.png", ""], ["*.png", "below/../a.png", "below", ""]],
)
def test_a_file_that_several_inputs_name_is_taken_once(images, inputs, caplog):
    found = plan_files([images / one for one in inputs], images.parent / "out", overwrite=False)
    there = ["a.png"] if inputs == ["a.png", "a.png"] else ["a.png", "b.jpg", "c.bmp"]
    assert sorted(one.source.name for one in found) == there
    assert "taken once" in caplog.text


def test_a_folder_gives_the_images_of_every_format_and_counts_the_rest(tmp_path, image, caplog):
    """One without an ending is known by its content."""
    content = cv2.imencode(".png", image)[1].tobytes()
    images = [*(f"p{ending}" for ending in SUFFIXES), "Q.JFIF", "without"]
    for name in (*images, "film.mp4", "notes.txt", "more.txt", "README", "p.heic"):
        (tmp_path / name).write_bytes(content if name in images else b"no image")
    found = plan_files([tmp_path], tmp_path / "out", overwrite=False)
    assert sorted(one.name for one in found) == sorted(images)
    for counted in (
        "passed over: 2 .txt",
        "1 .mp4",
        "1 without an ending",
        "write images of .heic as JPEG",
    ):
        assert counted in caplog.text
    with pytest.raises(DataError, match=r"holds no image.* but 1 \.mp4"):
        (tmp_path / "film").mkdir()
        shutil.copy(tmp_path / "film.mp4", tmp_path / "film")
        plan_files([tmp_path / "film"], tmp_path / "out", overwrite=False)


@pytest.mark.parametrize(
    ("inputs", "output", "error", "words"),
    [
        (["images/missing.jpg"], "out", DataError, "missing.jpg"),
        (["images/a.png", "MODEL.DEVICE"], "out", DataError, "KEY VALUE"),
        (["empty"], "out", DataError, "empty"),
        (["https://host/a.jpg"], "out", DataError, "https://host/a.jpg"),
        (["images/a.png", "other/a.png"], "out", ConfigError, "other/a.png"),
        (["images"], "other", ConfigError, r"a\.png.*--overwrite"),
        (["images/a.png"], "images", ConfigError, r"a\.png is an input"),
    ],
)
def test_inputs_that_cannot_be_are_refused(
    images, tmp_path, monkeypatch, inputs, output, error, words
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    shutil.copy(images / "a.png", tmp_path / "other" / "a.png")
    with pytest.raises(error, match=words):
        plan_files(inputs, output, overwrite=False)
    assert not (tmp_path / "out").exists()
    if output == "other":
        assert len(plan_files(inputs, output, overwrite=True)) == 3
    if output == "images":
        with pytest.raises(error, match=words):
            plan_files(inputs, output, overwrite=True)


def with_data(json_file, images):
    cfg = tiny_config()
    cfg.DATASETS.TEST_JSON, cfg.DATASETS.TEST_IMAGES = str(json_file), str(images)
    return cfg


def test_a_dataset_brings_its_ground_truth(predictor, annotated, tmp_path):
    images = plan_dataset("tiny_annotated", tiny_config(), tmp_path / "out", False)
    assert [p.target.name for p in images] == ["a.png", "b.jpg"]
    assert [len(p.annotations) for p in images] == [1, 0]
    first = images[0]
    assert first.true_class_names[first.annotations[0]["category_id"]] == "class7"
    assert len(plan_dataset("tiny_annotated", tiny_config(), tmp_path / "out", False, 1)) == 1
    predict(predictor, images)
    assert cv2.imread(str(first.target)).shape == (384 + 26, 2 * 512 + 4, 3)


def test_images_of_a_dataset_stay_inside_the_output_folder(annotated, tmp_path):
    json_file, images = annotated
    content = json.loads(json_file.read_text())
    content["images"][0]["file_name"] = "../a.png"
    content["images"][1]["file_name"] = str(images / "b.jpg")
    json_file.write_text(json.dumps(content))
    cfg = with_data(json_file, images / "below")
    pictures = plan_dataset("test", cfg, tmp_path / "out", False)
    assert [p.target for p in pictures] == [tmp_path / "out/a.png", tmp_path / "out/b.jpg"]


@pytest.mark.parametrize(
    ("name", "output", "words"),
    [
        ("tiny_anotated", "out", "tiny_anotated"),
        ("train", "out", r"DATASETS\.TRAIN"),
        ("tiny_annotated", "images", r"b\.jpg.*input"),  # an image beyond the limit
    ],
)
def test_datasets_that_cannot_be_drawn(annotated, tmp_path, name, output, words):
    json_file, images = annotated
    content = json.loads(json_file.read_text())
    for image, path in zip(content["images"], ("b.jpg", "below/b.jpg"), strict=True):
        image["file_name"] = path
    shutil.copy(images / "b.jpg", images / "below")
    json_file.write_text(json.dumps(content))
    folder = images / "below" if output == "images" else tmp_path / output
    with pytest.raises(ConfigError, match=words):
        plan_dataset(name, with_data(json_file, images), folder, True, 1)


# ---- drawing files


def test_every_image_gets_its_image(predictor, images, tmp_path):
    for name, size in (("flat.png", (1, 300)), ("thin.png", (300, 1))):
        cv2.imwrite(str(images / name), np.zeros((*size, 3), np.uint8))
    output = tmp_path / "out"
    planned = plan_files([images], output, False)
    result = predict(predictor, planned)
    files = sorted(p for p in output.rglob("*") if p.is_file())
    assert files == sorted(result.written) and len(files) == 5
    for image in planned:
        assert cv2.imread(str(image.target)).shape == cv2.imread(str(image.source)).shape
    assert result.instances > 0 and not result.unreadable


def test_an_unreadable_image_is_named_and_the_rest_follows(predictor, images, tmp_path, caplog):
    content = (images / "b.jpg").read_bytes()
    (images / "b.jpg").write_bytes(content[: len(content) // 3])
    (images / "a.png").write_bytes(b"")
    result = predict(predictor, plan_files([images], tmp_path / "out", False))
    assert [p.name for p in result.unreadable] == ["a.png", "b.jpg"]
    assert [p.name for p in result.written] == ["c.bmp.png"]
    assert str(images / "a.png") in caplog.text and str(images / "b.jpg") in caplog.text


@pytest.mark.parametrize(
    ("names", "output", "error", "words"),
    [
        (["a.jpg", "b.mp4"], "out", DataError, r"a\.jpg"),  # nothing can be read
        (["c.png"], "a.jpg/out", ConfigError, r"a\.jpg/out/c\.png"),  # no folder can be there
        (["d.ppm"], "out", ConfigError, r"d\.jpg.*65600"),  # no JPEG is as wide
    ],
)
def test_what_cannot_be_read_or_written(run, tmp_path, names, output, error, words):
    predictor = Predictor(run[1], score_threshold=1.0)  # to draw into a wide image takes seconds
    for name in ("a.jpg", "b.mp4"):
        (tmp_path / name).write_text("no image")
    cv2.imwrite(str(tmp_path / "c.png"), np.zeros((8, 8, 3), np.uint8))
    cv2.imwrite(str(tmp_path / "d.ppm"), np.zeros((1, 65_600, 3), np.uint8))
    planned = plan_files([tmp_path / name for name in names], tmp_path / output, False)
    for image in planned:
        if image.source.suffix == ".ppm":
            image.target = image.target.with_name("d.jpg")
    with pytest.raises(error, match=words):
        predict(predictor, planned)
    assert not list(tmp_path.glob("out/*"))


def write_video(path, sizes=(48, 64)):
    height, width = sizes
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 12.5, (width, height))
    for index in range(6):
        frame = np.full((height, width, 3), 40 * index, np.uint8)
        writer.write(frame)
    writer.release()


@pytest.mark.slow
def test_a_video_keeps_its_frames_rate_and_size(predictor, tmp_path):
    write_video(tmp_path / "film.mp4")
    annotations, tables = Annotations(predictor.class_names), Tables(predictor.class_names)
    planned = plan_files([tmp_path / "film.mp4"], tmp_path / "out", False)
    result = predict(predictor, planned, [annotations, tables])
    frames = [f"film.mp4/{number:06d}.png" for number in range(1, 7)]
    annotations.save(tmp_path / "labels", "yolo")
    tables.save(tmp_path / "found.csv")
    labels = (tmp_path / "labels").rglob("0*.txt")
    assert sorted(p.stem for p in labels) == [frame[-10:-4] for frame in frames]
    counts = (tmp_path / "found_counts.csv").read_text("utf-8").splitlines()
    assert [row.split(",")[0] for row in counts[1:]] == frames
    assert sum(int(row.split(",")[-1]) for row in counts[1:]) == result.instances > 0
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["film.mp4"]
    capture = cv2.VideoCapture(str(result.written[0]))
    assert capture.get(cv2.CAP_PROP_FPS) == pytest.approx(12.5, abs=0.01)
    frames = [capture.read()[1] for _ in range(6)]
    assert capture.read()[1] is None
    assert [frame.shape for frame in frames] == [(48, 64, 3)] * 6
    # Frames stay in their order: they were made brighter one after the other.
    brightness = [np.median(frame) for frame in frames]
    assert brightness == sorted(brightness) and brightness[-1] - brightness[0] > 100


@pytest.mark.slow
def test_a_film_of_odd_sides_keeps_its_last_pixels(predictor, tmp_path, monkeypatch):
    """Read by a stand-in, because OpenCV writes no such film."""
    frames, real = [np.full((33, 65, 3), 90, np.uint8)] * 2, cv2.VideoCapture
    film = SimpleNamespace(
        read=lambda left=[*frames, None]: (True, left.pop(0)),
        get={cv2.CAP_PROP_FRAME_COUNT: 2, cv2.CAP_PROP_FPS: 10}.get,
    )
    (tmp_path / "odd.avi").touch()
    planned = plan_files([tmp_path / "odd.avi"], tmp_path / "out", False)
    monkeypatch.setattr(cv2, "VideoCapture", lambda p: film if p.endswith("odd.avi") else real(p))
    result = predict(predictor, planned)
    assert real(str(result.written[0])).read()[1].shape == (34, 66, 3)


class _FullDisk:
    """A writer of videos that meets a full disk: at the third frame, as OpenCV 5 says, or at the
    end of the file, as OpenCV 4 does not say."""

    def __init__(self, writer, says_so):
        self.release, self.isOpened = writer.release, lambda: True
        self._results = iter([True, True, False] if says_so else [None] * 6)

    def write(self, frame):
        return next(self._results)


def _interrupted(*_, **__):
    raise KeyboardInterrupt


@pytest.mark.parametrize("end", ["interrupted", "full and said", "full and not said"])
def test_a_video_cut_short_leaves_no_half_image(predictor, tmp_path, monkeypatch, end):
    write_video(tmp_path / "film.mp4")
    images = plan_files([tmp_path / "film.mp4"], tmp_path / "out", False)
    if end == "interrupted":
        monkeypatch.setattr("lambda_det.detection.prediction.files.draw_predictions", _interrupted)
    else:
        real, says_so = cv2.VideoWriter, end == "full and said"
        monkeypatch.setattr(cv2, "VideoWriter", lambda *words: _FullDisk(real(*words), says_so))
    with pytest.raises((KeyboardInterrupt, ConfigError), match=r"^$|out/film\.mp4"):
        predict(predictor, images)
    assert not list((tmp_path / "out").iterdir())


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="needs limits of POSIX")
@pytest.mark.parametrize("name", ["film.mp4", "photo.jpg"])
def test_files_that_find_no_space(predictor, tmp_path, name):
    """In a process that may write files of 4 kB, which meets an error as on a full disk."""
    resource = pytest.importorskip("resource")
    noise = np.random.default_rng(0).integers(0, 255, (240, 320, 3), dtype=np.uint8)
    cv2.imwrite(str(tmp_path / "photo.jpg"), noise)
    write_video(tmp_path / "film.mp4", sizes=(240, 320))
    planned = plan_files([tmp_path / name], tmp_path / "out", False)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(ConfigError, match=str(tmp_path / "out" / name)):
            predict(predictor, planned)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list((tmp_path / "out").iterdir())


# ---- annotations and tables


def read_coco(path) -> COCO:
    with contextlib.redirect_stdout(io.StringIO()):
        return COCO(str(path))


@pytest.mark.slow
def test_annotations_are_what_was_found(predictor, images, tmp_path):
    planned = plan_files([images], tmp_path / "out", False)
    annotations = Annotations(["circle", "<square>", "ring"])
    predict(predictor, planned, [annotations])
    annotations.save(tmp_path / "new" / "found.json")
    Annotations(None).save(tmp_path / "none.json")
    assert read_coco(tmp_path / "none.json").anns == {}
    coco = read_coco(tmp_path / "new" / "found.json")
    assert [i["file_name"] for i in coco.imgs.values()] == ["a.png", "b.jpg", "below/c.bmp"]
    assert [c["name"] for c in coco.cats.values()] == ["circle", "<square>", "ring"]
    found = predictor(images / "b.jpg")
    anns = coco.imgToAnns[2]
    assert len(anns) == len(found) > 0 and sorted(coco.anns) == list(range(1, len(coco.anns) + 1))
    for index, annotation in enumerate(anns):
        x, y, w, h = annotation["bbox"]
        np.testing.assert_allclose([x, y, x + w, y + h], found.boxes[index], atol=0.02)
        assert annotation["category_id"] == found.classes[index] + 1
        assert annotation["score"] == pytest.approx(found.scores[index], abs=1e-5)
        assert annotation["area"] == found.masks[index].sum()
        # So that its mask AP is the evaluation's
        np.testing.assert_array_equal(coco.annToMask(annotation), found.masks[index])


def _filled(*places):
    mask = np.zeros((100, 140), bool)
    for place in places:
        mask[place] = True
    return mask


_Y, _X = np.mgrid[:100, :140]
_DISC = (_X - 40) ** 2 + (_Y - 50) ** 2 < 30**2
_RING = _DISC & ((_X - 45) ** 2 + (_Y - 52) ** 2 > 9**2)
# Masks, and in how many parts
MASKS = {
    "disc and square": (_filled(_DISC, (slice(15, 65), slice(90, 130)), (3, 3)), 3),
    "square": (_filled((slice(10, 14), slice(20, 24))), 1),
    "all": (_filled((slice(None), slice(None))), 1),
    "pixel": (_filled((5, 5)), 1),
    "row": (_filled((5, slice(3, 9))), 1),
    "column": (_filled((slice(3, 9), 5)), 1),
    "diagonal": (_filled((np.arange(2, 8), np.arange(2, 8))), 1),
    "corner": (_filled(([2, 3, 4, 5, 5, 5], [2, 2, 2, 2, 3, 4])), 1),
    "ring with a disc": (_filled(_RING, (slice(50, 54), slice(43, 47))), 2),
    "sieve": (_filled(_DISC) & ~_filled((slice(None, None, 5), slice(None, None, 7))), 1),
    "noise": (np.random.default_rng(0).random((100, 140)) < 0.5, None),
}


@pytest.mark.parametrize("name", MASKS)
def test_polygons_are_their_mask(name):
    mask, parts = MASKS[name]
    found = polygons(mask)
    drawn = mask_util.decode(mask_util.merge(mask_util.frPyObjects(found, 100, 140))).astype(bool)
    np.testing.assert_array_equal(drawn, mask)
    assert parts in (None, len(found))
    rows, columns = np.nonzero(mask)
    points = np.concatenate(found).reshape(-1, 2)
    assert points.min(0).tolist() == [columns.min(), rows.min()]
    assert points.max(0).tolist() == [columns.max() + 1, rows.max() + 1]


@pytest.mark.parametrize("name", MASKS)
def test_outlines_to_correct_have_few_points_and_no_specks(name):
    """They stay within a pixel of the mask's, and the largest part stays whatever its size."""
    mask, _ = MASKS[name]
    exact, found = polygons(mask), polygons(mask, for_hands=True)
    drawn = mask_util.decode(mask_util.merge(mask_util.frPyObjects(found, 100, 140))).astype(bool)
    parts, labels = cv2.connectedComponents(mask.astype(np.uint8), connectivity=8)
    areas = [np.count_nonzero(labels == part) for part in range(1, parts)]
    if name != "noise":  # of holes
        assert len(found) == max(1, sum(area >= 10 for area in areas))
        kept = np.isin(labels, [n for n, a in enumerate(areas, 1) if a >= 10 or a == max(areas)])
        holes = cv2.morphologyEx(kept.astype(np.uint8), cv2.MORPH_CLOSE, np.ones((3, 3)))
        assert (drawn <= cv2.dilate(holes, np.ones((3, 3))).astype(bool)).all()
        assert (drawn >= cv2.erode(kept.astype(np.uint8), np.ones((3, 3))).astype(bool)).all()
    points = [sum(len(polygon) for polygon in outline) for outline in (found, exact)]
    assert points[0] <= points[1]
    if name == "ring with a disc":
        assert points[0] < points[1] / 3
        assert abs(drawn.sum() / mask.sum() - 1) < 0.03


def test_annotations_of_boxes_keypoints_and_unknown_names(tmp_path):
    found = instances([[5, 5, 50.5, 40]], masks=False)
    found.pred_classes = torch.tensor([2])
    found.pred_keypoints = torch.tensor([[[6.0, 7.0, 0.9], [8.0, 9.0, 0.2]]])
    annotations = Annotations(None)
    annotations.add("a.png", Prediction(found))
    annotations.save(tmp_path / "found.json")
    content = json.loads((tmp_path / "found.json").read_text())
    assert [c["name"] for c in content["categories"]] == ["0", "1", "2"]
    (annotation,) = content["annotations"]
    assert annotation["bbox"] == [5, 5, 45.5, 35] and annotation["area"] == 1592.5
    assert (
        annotation["keypoints"] == [5.5, 6.5, 2, 7.5, 8.5, 2] and annotation["num_keypoints"] == 2
    )
    assert annotation["segmentation"] == []


@pytest.mark.slow
def test_annotations_wait_in_little_memory():
    """Much less than the lists that they are read back as."""
    rng = np.random.default_rng(0)
    found = instances([[5, 5, 50, 40]] * 20)
    found.pred_masks = torch.from_numpy(rng.random((20, 48, 64)) > 0.3)
    annotations = Annotations(["a", "b", "c"])
    tracemalloc.start()
    try:
        annotations.add("a.png", Prediction(found))
        kept = tracemalloc.get_traced_memory()[0]
        lists = list(map(json.loads, annotations._annotations))
        assert len(lists) == 20 and 3 * kept < tracemalloc.get_traced_memory()[0] - kept
    finally:
        tracemalloc.stop()


def test_tables_of_instances_and_of_counts(tmp_path):
    """Areas are of masks; an image without instances is counted; a name may have commas."""
    tables = Tables(["circle", "square, round", "ring"])
    tables.add("a.png", Prediction(instances([[5, 5, 50.5, 40], [1, 2, 4, 6], [0, 0, 9, 9]])))
    tables.add("b.png", Prediction(instances([])))
    bare = instances([[1, 2, 4, 6.5]], masks=False)
    bare.pred_classes = torch.tensor([1])
    tables.add("below/c.png", Prediction(bare, ["circle", "square, round", "ring"]))
    tables.save(tmp_path / "new" / "found.csv")
    rows, counts = (
        list(csv.reader((tmp_path / "new" / name).open(newline="", encoding="utf-8")))
        for name in ("found.csv", "found_counts.csv")
    )
    assert rows[0] == ["picture", "class", "score", "x0", "y0", "x1", "y1", "area"]
    assert rows[1] == ["a.png", "0", "0.9", "5.0", "5.0", "50.5", "40.0", str(45.0 * 35)]
    assert rows[4] == ["below/c.png", "square, round", "0.9", "1.0", "2.0", "4.0", "6.5", "13.5"]
    assert counts == [
        ["picture", "circle", "square, round", "ring", "total"],
        ["a.png", "1", "1", "1", "3"],
        ["b.png", "0", "0", "0", "0"],
        ["below/c.png", "0", "1", "0", "1"],
    ]
    unknown = Tables(None)
    unknown.add("c.png", Prediction(bare))
    unknown.save(tmp_path / "unknown.csv")
    text = (tmp_path / "unknown_counts.csv").read_text("utf-8")
    assert text.split() == ["picture,0,1,total", "c.png,0,1,1"]
