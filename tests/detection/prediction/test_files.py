import contextlib
import csv
import io
import itertools
import json
import re
import shutil
import signal
from types import SimpleNamespace

import cv2
import numpy as np
import pytest
import torch
from pycocotools import mask as mask_util
from pycocotools.coco import COCO

from lambda_det import errors
from lambda_det.detection import drawing
from lambda_det.detection.data.label_files import polygons
from lambda_det.detection.drawing import draw_ground_truth, draw_predictions
from lambda_det.detection.prediction import Prediction, Predictor
from lambda_det.detection.prediction.annotations import Annotations
from lambda_det.detection.prediction.files import plan_files, predict
from lambda_det.detection.prediction.tables import Tables
from lambda_det.detection.run_masks import RunMasks
from lambda_det.errors import ConfigError, DataError
from lambda_det.files import SUFFIXES
from tests.coco import found, true_box


@pytest.fixture(scope="module")
def predictor(run):
    return Predictor(run[1], score_threshold=0.0)


def instances(boxes, masks=True, height=48, width=64):
    scores = torch.linspace(0.9, 0.6, len(boxes))
    return found((height, width), boxes, torch.arange(len(boxes)) % 3, scores, masks)


def plain(height, width, colour=128):
    return np.full((height, width, 3), colour, np.uint8)


def differs(one, other, by):
    """The pixels of which a colour differs by more."""
    return np.abs(one.astype(int) - other).max(-1) > by


# ---- drawing


@pytest.mark.parametrize("masks", [True, False])
def test_names_numbers_or_nothing_are_written_beside_boxes(masks):
    image = plain(200, 300)
    objects = instances([[100, 100, 200, 180]], masks, 200, 300)
    draw_predictions(image, objects, ["$\\frac$ \x1b\n", "b"])  # no formula
    named = draw_predictions(image, objects, ["cat", "dog"])
    numbered = draw_predictions(image, objects)
    bare = draw_predictions(image, objects, with_labels=False)
    for one, other in ((numbered, bare), (named, numbered)):
        assert differs(one, other, 40)[104:176, 104:196].any()
    assert masks or not differs(bare, image, 9)[104:176, 104:196].any()


@pytest.mark.parametrize("scale", [1, 4])
def test_a_box_is_seen_on_any_colour_and_hides_no_small_object(scale):
    """Also where all pixels have the colour of its class."""
    boxes = np.array([[10, 10, 22, 22], [30, 10, 110, 70]])
    objects = instances(boxes, masks=False, height=80, width=120)
    objects.pred_classes[:] = 0
    options = {"scale": scale, "with_labels": False}
    own_colour = draw_predictions(plain(80, 120), objects, **options)[40 * scale, 30 * scale]
    for colour in (own_colour, 0, 128, 255):
        image = plain(80, 120, colour)
        changed = differs(draw_predictions(image, objects, **options), image[0, 0], 60)
        for x0, y0, x1, y1 in boxes * scale:
            for edge in (x0, x1):
                columns = slice(edge - 2 * scale, edge + 2 * scale + 1)
                assert changed[y0 + 2 : y1 - 2, columns].any(1).all()
        assert not changed[13 * scale : 19 * scale, 13 * scale : 19 * scale].any()


def test_a_smaller_image_is_that_of_a_smaller_image():
    """Half of one whose boxes, masks and keypoints have twice the coordinates."""
    small = instances([[10, 10, 30, 40], [50, 20, 70, 60]], height=100, width=120)
    large = instances([[20, 20, 60, 80], [100, 40, 140, 120]], height=200, width=240)
    points = torch.tensor([[[15.0, 20.0, 1.0]], [[60.0, 40.0, 1.0]]])
    small.pred_keypoints, large.pred_keypoints = points, points * torch.tensor([2.0, 2.0, 1.0])
    image = plain(200, 240, 0)
    image[:, 120:] = 200
    half = image[::2, ::2]
    drawn = draw_predictions(image, large, scale=0.5)
    assert differs(drawn, draw_predictions(half, small), 30).mean() < 0.03
    assert differs(drawn, half, 30).mean() > 0.1


@pytest.fixture
def put(monkeypatch):
    """The places of the labels that a drawing shows, and of all boxes, in its pixels."""
    labels, boxes = [], []

    def put_labels(labelled, real=drawing._put_labels):
        real(labelled)
        boxes.extend(box.get_window_extent() for _, box in labelled)
        labels.extend(text.get_window_extent() for text, _ in labelled if text.get_visible())

    monkeypatch.setattr(drawing, "_put_labels", put_labels)
    return labels, boxes


def hidden(box, label):
    """The share of a box that a label covers."""
    sides = np.minimum(box.max, label.max) - np.maximum(box.min, label.min)
    return np.prod(np.maximum(sides, 0)) / np.prod(box.size)


def test_labels_cover_neither_each_other_nor_small_boxes(put):
    """Those of boxes at one place and of a cluster are moved to another edge, or left out."""
    labels, boxes = put
    cluster = [[20 + 30 * x, 30 + 20 * y, 36 + 30 * x, 44 + 20 * y] for x, y in np.ndindex(3, 4)]
    large = [[100, 100, 160, 160], [102, 100, 162, 160], [300, 200, 390, 240]]
    objects = instances([*large * 5, *cluster], height=300, width=400)
    draw_predictions(plain(300, 400, 0), objects, ["first", "second", "third"])
    assert 15 <= len(labels) < len(boxes) == 27
    assert not any(a.overlaps(b) for place, a in enumerate(labels) for b in labels[:place])
    assert max(hidden(box, label) for box in boxes for label in labels) < 0.3
    for label in labels:
        assert (label.min >= 0).all() and (label.max <= [400, 300]).all()
        assert any(box.padded(4).overlaps(label) for box in boxes)


@pytest.mark.parametrize("scale", [1, 15])
@pytest.mark.parametrize("size", [6, 30, 60, 285])
def test_an_object_alone_keeps_its_name(put, size, scale):
    """At the edges of a picture too, whatever its own size and however much it is enlarged."""
    labels, _ = put
    side = 300 // scale
    for x, y in itertools.product((0, 150 - size / 2, 300 - size), (0, 300 - size)):
        box = np.array([x, y, x + size, y + size]) / scale
        objects = instances([box.tolist()], False, side, side)
        draw_predictions(plain(side, side), objects, ["a long name", "dog"], scale)
        assert labels.pop().width > 50


def test_a_box_lies_above_those_of_lower_scores_and_a_label_above_all_boxes():
    """The first box is the larger one, which Detectron2 draws first; it crosses the other twice."""
    boxes = instances([[80, 100, 200, 250], [190, 150, 320, 280]], False, 300, 400)
    for options in ({}, {"with_labels": False}):
        drawn = draw_predictions(plain(300, 400, 0), boxes, ["cat", "dog"], **options)
        below, right = drawn[249:252, 100:196], drawn[105:245, 199:202]
        assert not differs(below, below[:, :1], 9).any()
        # where the label of the other box begins
        assert differs(right, right[:1], 60)[47:55].all() == (not options)
        assert not differs(right, right[:1], 9)[[*range(40), *range(80, 140)]].any()


@pytest.mark.parametrize(
    "segmentation",
    [
        [[10, 10, 40, 10, 40, 30, 10, 30]],
        {"size": [48, 64], "counts": [490, 20, *[28, 20] * 29, 1162]},
        [],
    ],
)
def test_the_truth_is_drawn_in_all_forms_of_segmentation(segmentation):
    """A box without a mask is filled beside those that have one, and alone it is not."""
    image = plain(48, 64)
    one = true_box(10, 10, 30, 20, 1, segmentation=segmentation)
    other = true_box(50, 30, 10, 10, 1, segmentation=[[50, 30, 60, 30, 60, 40]])
    drawn = differs(draw_ground_truth(image, [one, other], ["a", "b"], scale=4), 128, 10)
    assert drawn.shape == (192, 256)
    assert drawn[80:112, 90:150].mean() > 0.95 and not drawn[150:, :120].any()
    alone = differs(draw_ground_truth(image, [one], scale=4), 128, 10)
    assert alone[80:112, 90:150].any() == bool(segmentation)


def test_prediction_and_truth_have_the_colour_of_their_class():
    # The other way round in the truth: the colour does not follow the order
    objects = instances([[100, 100, 200, 200], [300, 300, 400, 400]], height=512, width=512)
    objects.pred_classes = torch.tensor([2, 1])
    mask = [[400, 400, 500, 400, 500, 500, 400, 500]]  # then all of the truth is filled
    truth = [true_box(400, 400, 100, 100, 3, segmentation=mask)]
    truth += [true_box(x, x, 100, 100, category) for x, category in ((300, 1), (100, 2))]
    image = plain(512, 512)
    left, right = draw_predictions(image, objects), draw_ground_truth(image, truth)
    for x in (150, 350):
        assert not differs(left[x, x], right[x, x], 2)
    assert differs(left[150, 150], left[350, 350], 20)
    drawn = [differs(half, 128, 10)[430:490, 430:490].mean() > 0.9 for half in (left, right)]
    assert drawn == [False, True]


def test_two_reduced_drawings_of_an_image_have_one_size():
    """Detectron2 rounds the sides of its drawing down."""
    image, scale = plain(427, 601), 512 / 640
    drawn = draw_predictions(image, instances([], True, 427, 601), scale=scale)
    assert drawn.shape == draw_ground_truth(image, [], scale=scale).shape


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


def test_a_file_that_several_inputs_name_is_taken_once(images):
    inputs = [images / one for one in ("*.png", "below/../a.png", "below", "")]
    planned = plan_files(inputs, images.parent / "out", overwrite=False)
    assert sorted(one.source.name for one in planned) == ["a.png", "b.jpg", "c.bmp"]


def test_a_folder_gives_the_images_of_every_format_and_names_the_rest(tmp_path, image, caplog):
    content = cv2.imencode(".png", image)[1].tobytes()
    images = [*(f"p{ending}" for ending in SUFFIXES), "Q.JFIF"]
    labels = [f"p{ending}" for ending in (".xml", ".json", ".TXT", ".csv", ".yaml", ".yml")]
    (tmp_path / "film").mkdir()
    for name in (*images, "film/film.mp4", "notes.md", "more.md", "README", "p.heic", *labels):
        (tmp_path / name).write_bytes(content if name in images else b"no image")
    planned = plan_files([tmp_path], tmp_path / "out", overwrite=False)
    assert sorted(one.name for one in planned) == sorted(images)
    assert "files of .heic, .md, .mp4, README are not read" in caplog.text
    with pytest.raises(DataError, match=r"no image or video at .*film") as refused:
        plan_files([tmp_path / "film"], tmp_path / "out", overwrite=False)
    assert "KEY" not in str(refused.value)


@pytest.mark.parametrize(
    ("inputs", "output", "words"),
    [
        (["images/a.jgp"], "out", r"did you mean .*a\.png"),
        (["images/a.png", "MODEL.DEVICE"], "out", "KEY VALUE"),
        (["images/a.png", "train.device=cpu"], "out", "KEY VALUE"),  # of a LazyConfig
        (["empty"], "out", "empty"),
        (["https://host/a.jpg"], "out", "https://host/a.jpg"),
        (["images/a.png", "other/a.png"], "out", "other/a.png"),
        (["images"], "other", r"a\.png.*--overwrite"),
        (["images/a.png"], "images", r"a\.png is an input"),
        (["images/a.png"], "images/a.png", "is not a folder"),
    ],
)
def test_inputs_that_cannot_be_are_refused(images, tmp_path, monkeypatch, inputs, output, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "other").mkdir()
    shutil.copy(images / "a.png", tmp_path / "other" / "a.png")
    for overwrite in (False, True):
        if output == "other" and overwrite:
            assert len(plan_files(inputs, output, overwrite)) == 3
            continue
        with pytest.raises((ConfigError, DataError), match=words):
            plan_files(inputs, output, overwrite)
    assert not (tmp_path / "out").exists()


# ---- drawing files


def test_every_image_gets_its_image_and_an_unreadable_one_is_named(
    predictor, images, tmp_path, caplog, capsys, monkeypatch
):
    monkeypatch.setattr(errors, "_SILENCE", 0.001)
    for name, size in (("flat.png", (1, 300)), ("thin.png", (300, 1))):
        cv2.imwrite(str(images / name), plain(*size, 0))
    content = (images / "b.jpg").read_bytes()
    (images / "b.jpg").write_bytes(content[: len(content) // 3])
    (images / "empty.png").touch()
    output = tmp_path / "out"
    planned = plan_files([images], output, False)
    result = predict(predictor, planned)
    printed = capsys.readouterr()
    assert re.search(rf"so far; file 3 of {len(planned)}, about .* left", printed.err)
    assert result.empty == printed.out.count(": nothing") and result.seen == {"image": 4}
    assert [p.name for p in result.unreadable] == ["b.jpg", "empty.png"]
    assert str(images / "b.jpg") in caplog.text and str(images / "empty.png") in caplog.text
    files = sorted(p for p in output.rglob("*") if p.is_file())
    assert files == sorted(result.written) and len(files) == 4 and result.instances > 0
    for image in planned:
        if image.source not in result.unreadable:
            assert cv2.imread(str(image.target)).shape == cv2.imread(str(image.source)).shape


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (["a.jpg", "b.mp4"], r"a\.jpg"),  # nothing can be read
        (["c.png"], r"out/c\.png"),  # no folder can be there any more
    ],
)
def test_what_cannot_be_read_or_written(predictor, tmp_path, names, words):
    for name in ("a.jpg", "b.mp4"):
        (tmp_path / name).write_text("no image")
    cv2.imwrite(str(tmp_path / "c.png"), plain(8, 8))
    planned = plan_files([tmp_path / name for name in names], tmp_path / "out", False)
    if names == ["c.png"]:
        (tmp_path / "out").write_text("")
    with pytest.raises((ConfigError, DataError), match=words):
        predict(predictor, planned)
    assert not list(tmp_path.glob("out/*"))


@pytest.mark.parametrize("kind", [torch.Tensor, RunMasks])
def test_empty_masks_are_counted(kind, tmp_path):
    """In the picture and its table they look like boxes of a detector without masks."""
    cv2.imwrite(str(tmp_path / "a.png"), plain(48, 64))
    seen = instances([[2, 2, 9, 9], [20, 20, 40, 40], [50, 3, 60, 9]])
    seen.pred_masks[1] = False
    if kind is RunMasks:
        seen.pred_masks = RunMasks.of(seen.pred_masks)

    def predictor(image):
        return Prediction(seen, None, image)

    result = predict(predictor, plan_files([tmp_path / "a.png"], tmp_path / "out", False))
    assert (result.instances, result.empty_masks) == (3, 1)


def write_video(path, sizes=(48, 64)):
    height, width = sizes
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter_fourcc(*"mp4v"), 12.5, (width, height))
    for index in range(6):
        writer.write(plain(height, width, 40 * index))
    writer.release()


@pytest.mark.slow
def test_a_video_keeps_its_frames_rate_and_size(predictor, tmp_path):
    write_video(tmp_path / "film.mp4")
    annotations, tables = Annotations(predictor.class_names), Tables(predictor.class_names)
    planned = plan_files([tmp_path / "film.mp4"], tmp_path / "out", False)
    result = predict(predictor, planned, [annotations, tables])
    annotations.save(tmp_path / "labels", "yolo")
    tables.save(tmp_path / "found.csv")
    names = [f"{number:06d}" for number in range(1, 7)]
    assert sorted(p.stem for p in (tmp_path / "labels").rglob("0*.txt")) == names
    counts = list(csv.reader((tmp_path / "found_counts.csv").open()))[1:]
    assert [row[0] for row in counts] == [f"film.mp4/{name}.png" for name in names]
    assert sum(int(row[-1]) for row in counts) == result.instances > 0
    assert result.seen == {"frame": 6}
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
@pytest.mark.parametrize("height", [33, 34])
def test_a_film_of_odd_sides_keeps_its_last_pixels(
    predictor, tmp_path, monkeypatch, caplog, height
):
    """Read by a stand-in, because OpenCV writes no such film; it breaks off before its end."""
    frames, real = [plain(height, 65, 90)] * 2, cv2.VideoCapture
    film = SimpleNamespace(
        read=lambda left=[*frames, None]: (True, left.pop(0)),
        get={cv2.CAP_PROP_FRAME_COUNT: 3, cv2.CAP_PROP_FPS: 10}.get,
    )
    (tmp_path / "odd.avi").touch()
    planned = plan_files([tmp_path / "odd.avi"], tmp_path / "out", False)
    monkeypatch.setattr(cv2, "VideoCapture", lambda p: film if p.endswith("odd.avi") else real(p))
    result = predict(predictor, planned)
    assert real(str(result.written[0])).read()[1].shape == (34, 66, 3)
    assert "odd.avi ends after 2 of 3 frames" in caplog.text


# What OpenCV's writer of videos says where the disk is full: 5 says so, 4 does not
FULL = {"said": [True, True, False], "not said": [None] * 6}


@pytest.mark.parametrize("end", ["interrupted", *FULL])
def test_a_video_cut_short_leaves_no_half_image(predictor, tmp_path, monkeypatch, end):
    write_video(tmp_path / "film.mp4")
    images = plan_files([tmp_path / "film.mp4"], tmp_path / "out", False)
    if end == "interrupted":
        monkeypatch.setattr(
            "lambda_det.detection.prediction.files.draw_predictions",
            lambda *_, **__: signal.raise_signal(signal.SIGINT),
        )
    else:
        write = iter(FULL[end])
        full = SimpleNamespace(
            isOpened=lambda: True, write=lambda frame: next(write), release=lambda: None
        )
        monkeypatch.setattr(cv2, "VideoWriter", lambda *words: full)
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


@pytest.mark.slow
def test_annotations_are_what_was_found(predictor, images, tmp_path):
    names = ["circle", "<square>", "ring"]
    annotations = Annotations(names)
    predict(predictor, plan_files([images], tmp_path / "out", False), [annotations])
    annotations.save(tmp_path / "new" / "found.json")
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(str(tmp_path / "new" / "found.json"))
    assert [i["file_name"] for i in coco.imgs.values()] == ["a.png", "b.jpg", "below/c.bmp"]
    assert [c["name"] for c in coco.cats.values()] == names
    expected = predictor(images / "b.jpg")
    anns = coco.imgToAnns[2]
    assert len(anns) == len(expected) > 0 and sorted(coco.anns) == [*range(1, len(coco.anns) + 1)]
    for index, annotation in enumerate(anns):
        x, y, w, h = annotation["bbox"]
        np.testing.assert_allclose([x, y, x + w, y + h], expected.boxes[index], atol=0.02)
        assert annotation["category_id"] == expected.classes[index] + 1
        assert annotation["score"] == pytest.approx(expected.scores[index], abs=1e-5)
        assert annotation["area"] == expected.masks[index].sum()
        # So that its mask AP is the evaluation's
        np.testing.assert_array_equal(coco.annToMask(annotation), expected.masks[index])


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
    "all": (_filled((slice(None), slice(None))), 1),
    "pixel": (_filled((5, 5)), 1),
    "row": (_filled((5, slice(3, 9))), 1),
    "diagonal": (_filled((np.arange(2, 8), np.arange(2, 8))), 1),
    "ring with a disc": (_filled(_RING, (slice(50, 54), slice(43, 47))), 2),
    "sieve": (_filled(_DISC) & ~_filled((slice(None, None, 5), slice(None, None, 7))), 1),
    "noise": (np.random.default_rng(0).random((100, 140)) < 0.5, None),
}


def _drawn(outlines):
    return mask_util.decode(mask_util.merge(mask_util.frPyObjects(outlines, 100, 140))).astype(bool)


@pytest.mark.parametrize("name", MASKS)
def test_outlines_to_correct_have_few_points_and_no_specks(name):
    """They stay within a pixel of the mask's, and the largest part stays whatever its size.

    Others are their mask, with its parts and its box.
    """
    mask, parts = MASKS[name]
    exact, outlines = polygons(mask), polygons(mask, for_hands=True)
    np.testing.assert_array_equal(_drawn(exact), mask)
    assert parts in (None, len(exact))
    rows, columns = np.nonzero(mask)
    corners = np.concatenate(exact).reshape(-1, 2)
    assert corners.min(0).tolist() == [columns.min(), rows.min()]
    assert corners.max(0).tolist() == [columns.max() + 1, rows.max() + 1]
    drawn = _drawn(outlines)
    points = [sum(map(len, parts)) for parts in (outlines, exact)]
    assert points[0] <= points[1]
    if name == "ring with a disc":
        assert points[0] < points[1] / 3
        assert abs(drawn.sum() / mask.sum() - 1) < 0.03
    if name == "noise":  # of holes
        return
    parts, labels = cv2.connectedComponents(mask.astype(np.uint8), connectivity=8)
    areas = [np.count_nonzero(labels == part) for part in range(1, parts)]
    kept = [number for number, a in enumerate(areas, 1) if a >= 10 or a == max(areas)]
    assert len(outlines) == len(kept)
    square = np.ones((3, 3), np.uint8)
    pixels = np.isin(labels, kept).astype(np.uint8)
    holes = cv2.morphologyEx(pixels, cv2.MORPH_CLOSE, square)
    assert (drawn <= cv2.dilate(holes, square).astype(bool)).all()
    assert (drawn >= cv2.erode(pixels, square).astype(bool)).all()


def test_annotations_of_boxes_keypoints_and_unknown_names(tmp_path):
    objects = instances([[5, 5, 50.5, 40]], masks=False)
    objects.pred_classes = torch.tensor([2])
    objects.pred_keypoints = torch.tensor([[[6.0, 7.0, 0.9], [8.0, 9.0, 0.2]]])
    annotations = Annotations(None)
    annotations.save(tmp_path / "found.json")
    assert json.loads((tmp_path / "found.json").read_text())["annotations"] == []
    annotations.add("a.png", Prediction(objects))
    annotations.save(tmp_path / "found.json")
    content = json.loads((tmp_path / "found.json").read_text())
    assert [c["name"] for c in content["categories"]] == ["0", "1", "2"]
    (annotation,) = content["annotations"]
    assert annotation["bbox"] == [5, 5, 45.5, 35] and annotation["area"] == 1592.5
    assert annotation["keypoints"] == [5.5, 6.5, 2, 7.5, 8.5, 2]
    assert annotation["num_keypoints"] == 2 and annotation["segmentation"] == []


def test_tables_of_instances_and_of_counts(tmp_path):
    """Areas are of masks; an image without instances is counted; a name may have commas."""
    names = ["circle", "square, round", "ring"]
    tables, unknown = Tables(names), Tables(None)
    found = Prediction(instances([[5, 5, 50.5, 40], [1, 2, 4, 6], *[[0, 0, 9, 9]] * 2]), names)
    tables.add("below/a.png", found)
    tables.add("b.png", Prediction(instances([])))
    tables.save(tmp_path / "new" / "found.csv")
    rows, counts = (
        list(csv.reader((tmp_path / "new" / name).open(newline="", encoding="utf-8")))
        for name in ("found.csv", "found_counts.csv")
    )
    assert rows[0] == ["picture", "class", "score", "x0", "y0", "x1", "y1", "area"]
    area = str(45.0 * 35)
    assert rows[1] == ["below/a.png", "circle", "0.9", "5.0", "5.0", "50.5", "40.0", area]
    assert [row[1] for row in rows[2:]] == [*names[1:], "circle"]
    assert counts == [
        ["picture", *names, "total"],
        ["below/a.png", "2", "1", "1", "4"],
        ["b.png", "0", "0", "0", "0"],
    ]
    unknown.add("a.png", Prediction(found.instances[:2]))
    unknown.save(tmp_path / "unknown.csv")
    text = (tmp_path / "unknown_counts.csv").read_text("utf-8")
    assert text.split() == ["picture,0,1,total", "a.png,1,1,2"]
