"""What is decided about an annotation file in COCO's format, and what a report says of it."""

import json
import math
import os
import re
from pathlib import Path

import numpy as np
import pycocotools.mask as mask_util
import pytest
import shapely.affinity
from PIL import Image

from lambda_det.detection.data import annotations, check_coco, read_coco
from lambda_det.detection.data import report as kinds
from lambda_det.detection.data.coco import coco_content
from lambda_det.detection.data.coco_format import READER
from lambda_det.detection.data.truth import corners, usable_runs
from lambda_det.errors import DataError
from tests.coco import annotation, put
from tests.coco import coco_content as made_content
from tests.detection.data.fuzz import limits


def findings(report) -> dict[kinds.Kind, int]:
    """How often each kind of finding occurs, but for information."""
    return {k: f.count for k, f in report.findings.items() if k.severity != kinds.NOTED}


def test_a_sound_data_set(content, write):
    content["annotations"][1]["iscrowd"] = 1
    content["annotations"][0]["segmentation"] = {"size": [48, 64], "counts": [10, 500, 2562]}
    content["annotations"][0]["bbox"] = [0, 0, 11, 48]
    content["categories"][1]["keypoints"] = ["left eye", "right eye"]
    report = check_coco(*write(content))
    assert (report.images, report.annotations, report.crowds, report.usable) == (4, 8, 1, 7)
    assert (report.masks, report.most, report.empty) == (8, 2, 0)
    assert report.categories == {1: "apple", 5: "pear"}
    assert report.counts == {1: 4, 5: 4}
    assert report.findings == {} and report.refusal() is None


@pytest.mark.parametrize("entry_of_another", ["0.1", {"version": "1"}])
def test_what_another_program_writes_beside_the_lists_is_not_taken_for_ours(
    content, write, entry_of_another
):
    """Our readers of labels write places and findings there."""
    content["info"] = {"labels": "instances", "boxes": "polar", "findings": [{"score": 1}]}
    content[READER] = entry_of_another
    put("annotations", 3, bbox=[4, 6, 0, 0], source="a person")(content)
    json_file, images = write(content)
    report = check_coco(json_file, images)
    assert report.json_file == json_file
    assert "annotation" in report.findings[kinds.BOX].first[0]


def test_records_are_detectron2s(content, write):
    """In the order of the ids, with classes from 0 in the order of theirs."""
    content["images"].reverse()
    content["categories"].reverse()
    del content["annotations"][0]["area"]
    content["annotations"][0]["bbox"][2:] = ["20.0", "16"]  # as Roboflow writes them
    json_file, images = write(content)
    records, report = read_coco(json_file, images)
    assert [record["image_id"] for record in records] == [10, 20, 30, 40]
    first = records[0]
    assert (first["file_name"], first["height"], first["width"]) == (f"{images}/10.png", 48, 64)
    assert [a["category_id"] for a in first["annotations"]] == [0, 1]
    assert first["annotations"][0]["bbox"] == [4, 6, 20, 16]
    assert first["annotations"][0]["area"] == 20 * 16
    assert first["annotations"][0]["segmentation"] == content["annotations"][0]["segmentation"]
    assert [file["file_name"] for file in report.files] == [r["file_name"] for r in records]


def _fifth(**values):
    return put("annotations", 4, **values)


RUNS = {"size": [48, 64], "counts": [10, 500, 2562]}
# Changes of a data set that are one finding, what its case names, and how many objects are left
# fmt: off
FINDINGS = [
    (kinds.ID, put("images", 1, id=10), "id 10", 6),
    (kinds.ID, put("images", 1, file_name="./10.png"), "(id 10) and ./10.png (id 20)", 8),
    (kinds.ID, put("categories", 1, id=1), "id 1", 4),
    (kinds.ID, _fifth(image_id=99), "annotation 5 of image 99: image_id 99", 7),
    (kinds.ID, _fifth(category_id=2), "annotation 5 of image 30 (30.png, 64x48): category_id 2", 7),
    (kinds.IMAGE, put("images", 2, width=2**40), f"30.png, {2**40}x48", 8),
    *((kinds.BOX, _fifth(bbox=box), "annotation 5 of image 30 (30.png, 64x48): bbox", 7)
      for box in (
        [1, 2, 3], [1, 2, math.nan, 3], [0, 0, 10**400, 5], [1, 2, -3, 4],
        [1, 2, 1e300, 4], ["one", 2, 3, 4], [100, 6, 20, 16],
        [0.1, 0.2, 0.3, 0.4],  # a share of 1
        [40, 30, 20, 16],  # elsewhere than its mask
    )),
    (kinds.BOX, _fifth(bbox=None, segmentation=None), "bbox None", 7),
    (kinds.BORDER, _fifth(bbox=[0, 0, 69, 48]), "5 pixels", 8),
    (kinds.BORDER, _fifth(bbox=[-3, 0, 64, 48]), "3 pixels", 8),
    (kinds.OUTSIDE, _fifth(bbox=[0, 0, 80, 48]), "16 pixels", 8),
    *((kinds.MASK, _fifth(segmentation=mask), "annotation 5", 8) for mask in (
        [[4, 6, 24, 6, 24, 22, 4, 22], [1, 2, 3]], [[1, 2, 3, 4, 5, math.nan]],
        [["a"] * 6], "nonsense", 3, [[5, 7, 20, 7, 20, 7]],
        {"size": [64, 48], "counts": [3072]}, {"size": [48, 64], "counts": [5]},
        {"size": [48, 64], "counts": [3072]},  # not a pixel
    )),
    *((kinds.VALUE, _fifth(keypoints=points), "keypoints", 8) for points in (
        3, [1, 2, math.nan], [1e7, 1, 2], [1, 2], ["1", "2", "2"], [[1, 2, 2]])),
    (kinds.VALUE, _fifth(iscrowd="no"), "iscrowd 'no'", 8),
    (kinds.VALUE, _fifth(ignore="no"), "ignore 'no'", 8),
    (kinds.MEANT, _fifth(ignore=1), "ignore 1", 7),
    (kinds.MEANT, _fifth(bbox=None), "the box of its mask", 8),
    (kinds.MEANT, _fifth(bbox=[]), "the box of its mask", 8),
    *((kinds.MEANT, _fifth(segmentation=mask), "list of lists", 8) for mask in (
        [4, 6, 24, 6, 24, 22, 4, 22], [[4, 6], [24, 6], [24, 22]], [[[4, 6], [24, 6], [24, 22]]])),
    *((kinds.MEANT, _fifth(area=area), "area", 8) for area in (0, 10_000)),
    (kinds.CLASS, put("categories", 1, name="apple"), "1: 'apple', 5: 'apple'", 8),
    (kinds.CLASS, put("categories", 1, name=" Apple"), "1: 'apple', 5: ' Apple'", 8),
    (kinds.NO_MASK, _fifth(segmentation=None), "30.png, 64x48: 1", 8),
    (kinds.NO_MASK, _fifth(segmentation=[]), "30.png, 64x48: 1", 8),
    (kinds.EMPTY, lambda c: c["images"].append({**c["images"][0], "id": 50, "file_name": "50.png"}),
     "50.png", 8),
]
# fmt: on


@pytest.mark.parametrize("degrees", [90, 30.5, -200])
def test_boxes_are_turned_by_the_angle_that_cvat_writes(content, read, degrees):
    """A box and its angle: turned clockwise about its middle, where y points down."""
    box, said = [20, 20, 20, 4], {"occluded": False, "rotation": degrees}
    content["annotations"] = [
        annotation(1, 10, box, attributes=said, segmentation=[]),
        annotation(2, 10, box, attributes=said),  # has its mask
    ]
    truth = read(content)
    turned, straight = truth.records[0]["annotations"]
    assert straight["bbox"] == box and truth.report.findings[kinds.MEANT].count == 1
    expected = shapely.affinity.rotate(shapely.box(20, 20, 40, 24), degrees)
    assert corners(turned) == pytest.approx(expected.bounds) and turned["area"] == 80
    outline = shapely.Polygon(np.reshape(turned["segmentation"], (-1, 2)))
    assert outline.symmetric_difference(expected).area < 1e-6


@pytest.mark.parametrize(
    "said",
    [
        *({"occluded": False, "rotation": turn} for turn in (0.0, True, "90")),
        {"rotation": 90},  # of another program
    ],
)
def test_other_angles_turn_no_box(content, read, said):
    box = [20, 20, 20, 4]
    content["annotations"] = [annotation(1, 10, box, attributes=said, segmentation=[])]
    truth = read(content)
    assert [a["bbox"] for a in truth.records[0]["annotations"]] == [box]
    assert kinds.MEANT not in truth.report.findings


@pytest.mark.parametrize("number", range(len(FINDINGS)))
def test_each_finding_alone(content, write, number):
    kind, change, expected, left = FINDINGS[number]
    change(content)
    json_file, images = write(content)
    report = read_coco(json_file, images).report
    finding = report.findings.pop(kind)
    assert finding.count == 1 or kind == kinds.ID
    assert expected in finding.first[0]
    assert report.usable == left
    # What follows from it is for information alone, or an id of what is not there any more
    assert set(report.findings) <= {kinds.EMPTY, kinds.NO_MASK, kinds.ID}
    report.findings[kind] = finding
    refusal = report.refusal()
    assert bool(refusal) == (kind.severity in (kinds.REFUSED, kinds.UNUSABLE))  # one of eight
    command = f"lambda-det check {json_file} {images}"
    assert not refusal or (kind.text in refusal and command in refusal)


def test_unusable_annotations_are_borne_up_to_one_percent(content, read):
    for number in range(9, 201):
        content["annotations"].append(annotation(number, 10, [1, 1, 5, 5]))
    for place, box in ((0, [1, 1, 5, 0]), (1, [1, 1, 5, 500])):
        content["annotations"][place].update(bbox=box, segmentation=[])
    assert read(content).report.refusal() is None
    content["annotations"][2]["bbox"] = [1, 1, 5, 0]
    refusal = read(content).report.refusal()
    assert "3 of 200" in refusal and "annotation 1 of image 10" in refusal


def test_an_object_counts_once_however_much_of_it_cannot_be_used(content, read):
    """And nothing is said to replace the mask of one that is left out."""
    for number in range(9, 201):
        content["annotations"].append(annotation(number, 10, [1, 1, 5, 5]))
    outline = [4000, 6, 4020, 6, 4020, 22, 4000, 22]
    content["annotations"][0].update(bbox=[4000, 6, 20, 16], segmentation=[outline])
    content["annotations"][1].update(bbox=[0, 0, 80, 48], segmentation="nonsense")
    report = read(content).report
    counts = {kind: report.findings[kind].count for kind in report.of(kinds.UNUSABLE)}
    assert counts == {kinds.BOX: 1, kinds.OUTSIDE: 1, kinds.MASK: 1}
    assert "annotation 2 of" in report.findings[kinds.MASK].first[0]
    assert report.refusal() is None  # two of 200
    content["annotations"][2]["bbox"] = [1, 1, 5, 0]
    assert "3 of 200" in read(content).report.refusal()


def test_a_long_value_is_cut_at_a_blank_and_says_so(content, read):
    outline = [v / 7 for v in range(60)] + [float("nan")]
    content["annotations"][4]["segmentation"] = [outline]
    (case,) = read(content).report.findings[kinds.MASK].first
    numbers = case.partition("segmentation ")[2].removesuffix(", ...")
    assert (
        numbers == str([outline])[: len(numbers)] and float(numbers.rpartition(" ")[2]) in outline
    )


def test_boxes_over_the_border_are_cut(content, read):
    """A few pixels are no reason to refuse, however many boxes have them; a pixel is rounding."""
    for entry in content["annotations"]:
        entry.update(bbox=[40, 30, 27, 21], segmentation=[])
    content["annotations"][0]["bbox"] = [-0.5, -1, 10, 50]
    truth = read(content)
    boxes = [a["bbox"] for record in truth.records for a in record["annotations"]]
    assert boxes == [[-0.5, -1, 10, 50]] + [[40, 30, 24, 18]] * 7
    assert findings(truth.report) == {kinds.BORDER: 7} and truth.report.refusal() is None
    assert len(truth.report.findings[kinds.BORDER].first) == 3


@pytest.mark.parametrize(
    ("box", "other", "is_named"),
    [
        ([4, 6, 20, 16], [5, 6, 20, 17], True),
        ([40, 20, 120, 70], [42, 21, 119, 70], True),
        ([40, 20, 120, 70], [46, 20, 120, 70], False),
        ([4, 6, 3, 3], [5, 6, 3, 3], False),  # specks beside each other
    ],
)
@pytest.mark.parametrize("category", [1, 5])
def test_one_object_with_two_annotations_is_named(content, read, box, other, is_named, category):
    content["images"][0].update(width=200, height=100)
    pair = [annotation(1, 10, box), annotation(2, 10, other, category_id=category)]
    content["annotations"][:2] = pair
    assert (kinds.TWICE in read(content).report.findings) == (is_named and category == 1)


@pytest.mark.parametrize(
    ("area", "is_named"), [(224, True), (320, False), (416, False), (None, False)]
)
def test_a_polygon_that_the_area_calls_a_hole_is_named(content, read, area, is_named):
    outlines = [[4, 6, 24, 6, 24, 22, 4, 22], [8, 10, 8, 18, 20, 18, 20, 10]]
    content["annotations"][0] |= {"segmentation": outlines, "area": area}
    assert (kinds.FILLED in read(content).report.findings) == is_named


def test_images_of_as_many_pixels_as_pillow_reads_and_one_more(content, read):
    for over in (0, 1):
        pixels = 2 * Image.MAX_IMAGE_PIXELS + over
        content["images"][2].update(width=pixels, height=1)
        assert (kinds.IMAGE in read(content).report.findings) == bool(over)
    # nor is its mask unpacked
    assert usable_runs({"size": [1, pixels], "counts": [pixels]}, 1, pixels) is None


def test_compressed_runs_that_do_not_end():
    """pycocotools would read or write past its memory: in unpacking, or in comparing masks."""
    mask = np.asfortranarray(np.random.rand(40, 60) < 0.3)
    sound = mask_util.encode(mask.astype(np.uint8))["counts"]
    for counts in (sound, sound.decode()):
        assert usable_runs({"size": [40, 60], "counts": counts}, 40, 60)["counts"] is counts
    ends = [at + 1 for at, digit in enumerate(sound[:-1]) if not (digit - 48) & 32]
    short = [sound[:at] for at in ends]
    broken = ("å", "P", sound[:-1] + b"o", b"\xff", "/0", " ", None, 3, b"", "0")
    for counts in (*broken, *short):
        assert usable_runs({"size": [40, 60], "counts": counts}, 40, 60) is None


# ----------------------------------------------------------------------------- as people write them
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-32"])
def test_other_encodings_of_unicode(content, write, encoding):
    json_file, images = write(content)
    Path(json_file).write_text(json.dumps(content), encoding)
    assert read_coco(json_file, images).report.findings == {}


@pytest.mark.parametrize("form", [float, str, lambda number: f"000{number}"])
def test_ids_in_another_form(content, write, form):
    json_file, images = write(content)
    before = read_coco(json_file, images)
    for entry in content["images"]:
        entry.update(id=form(entry["id"]), width=form(entry["width"]))
    for entry in content["annotations"]:
        entry.update(image_id=form(entry["image_id"]), category_id=form(entry["category_id"]))
    for entry in content["categories"]:
        entry["id"] = form(entry["id"])
    Path(json_file).write_text(json.dumps(content))
    assert read_coco(json_file, images) == before


@pytest.mark.posix
def test_a_size_that_is_missing_is_that_of_the_image(content, write):
    """Of a named pipe there is none, and to open it would wait for ever."""
    json_file, images = write(content)
    for entry, size in zip(content["images"], ({}, {"width": 0}, {"width": None}), strict=False):
        entry.pop("height")
        entry.update(size)
    Path(json_file).write_text(json.dumps(content))
    truth = read_coco(json_file, images)
    assert {(r["width"], r["height"]) for r in truth.records} == {(64, 48)}
    assert findings(truth.report) == {kinds.MEANT: 3}
    Path(images, "20.png").unlink()
    assert "20.png" in read_coco(json_file, images).report.refusal()
    os.mkfifo(f"{images}/20.png")
    with limits():
        assert "20.png" in read_coco(json_file, images).report.refusal()


def test_images_are_found_below_the_folder(content, write):
    """test_image_folder.py has more names."""
    json_file, images = write(content)
    Path(images, "cam1").mkdir()
    for entry in content["images"]:
        Path(images, entry["file_name"]).rename(Path(images, "cam1", entry["file_name"]))
        entry["file_name"] = f"https://example.org/set/cam1/{entry['file_name']}?token=1"
    Path(json_file).write_text(json.dumps(content))
    truth = read_coco(json_file, images)
    assert truth.report.findings == {}
    assert truth.records[0]["file_name"] == f"{images}/cam1/10.png"
    assert coco_content(truth)["images"][0]["file_name"] == "cam1/10.png"


@pytest.mark.parametrize(
    ("there", "names", "words"),
    [
        (["one/a.png", "two/a.png"], ["a.png"], "one/a.png, .*two/a.png"),
        (
            ["one/a.png"],
            ["/me/two/a.png", "one/a.png"],
            r"two/a.png \(id 0\) and one/a.png \(id 1\)",
        ),
        (["one/a.png", "two/b.png"], ["/me/two/a.png"], "/me/two/a.png"),
        (["one/a.png"], ["/me/two/a.png", "/me/three/a.png"], "two/a.png .*/me/three/a.png"),
        # the folder's own name is a part of the second
        (["a.png"], ["one/a.png", "set/a.png"], "one/a.png .*set/a.png .*one image, .*a.png"),
    ],
)
def test_names_that_do_not_say_which_image(tmp_path, there, names, words):
    for path in (tmp_path / "set" / name for name in there):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (64, 48)).save(path)
    content = made_content(dict(enumerate(names)), [annotation(1, 0, [1, 1, 5, 5])], {1: "a"})
    (tmp_path / "set.json").write_text(json.dumps(content))
    report = check_coco(tmp_path / "set.json", tmp_path / "set")
    found = report.of(kinds.REFUSED).values()
    assert re.search(words, " ".join(case for finding in found for case in finding.first))


@pytest.mark.parametrize(
    ("change", "is_class"),
    [
        (put("categories", 0, id=0), False),
        (put("annotations", 0, category_id=0), True),
        (put("categories", 2, supercategory="food"), True),
        (put("categories", 0, supercategory="things"), True),  # has a parent of its own
    ],
)
def test_a_category_above_all_others_is_no_class(content, read, change, is_class):
    """Roboflow writes the project's name as category 0, in each file: nothing to warn of."""
    for entry in content["categories"]:
        entry["supercategory"] = "fruit"
    content["categories"].insert(0, {"id": 0, "name": "fruit", "supercategory": "none"})
    change(content)
    report = read(content).report
    expected = {0: "fruit", 1: "apple", 5: "pear"}
    assert report.categories == (expected if is_class else {1: "apple", 5: "pear"})
    assert (kinds.ROOT not in report.findings) == is_class and findings(report) == {}


# ------------------------------------------------------------------------- boxes of another form
WIDE = 200, 100
# What other forms write for x, y, width and height in pixels
FORMS = {
    "[x, y, width, height]": lambda x, y, w, h: [x, y, w, h],
    "corners": lambda x, y, w, h: [x, y, x + w, y + h],
    "centre": lambda x, y, w, h: [x + w / 2, y + h / 2, w, h],
    "[x, y, height, width]": lambda x, y, w, h: [x, y, h, w],
    "[y, x, height, width]": lambda x, y, w, h: [y, x, h, w],
    "corners [y0, x0, y1, x1]": lambda x, y, w, h: [y, x, y + h, x + w],
    "[x0, x1, y0, y1]": lambda x, y, w, h: [x, x + w, y, y + h],
}
SHARES = "shares of 1 of "


def boxes_of(form: str, count: int = 40, *removed: str) -> dict:
    """A file whose boxes all have a form, in the whole image, without some of the keys."""
    rng = np.random.default_rng(0)
    entries = []
    for number in range(1, count + 1):
        w, h = rng.integers(8, (90, 45)).tolist()
        x, y = rng.integers(0, (200 - w, 100 - h)).tolist()
        entry = annotation(number, number % 4, [x, y, w, h], **dict.fromkeys(removed))
        entry["bbox"] = FORMS[form.removeprefix(SHARES)](x, y, w, h)
        if form.startswith(SHARES):
            entry["bbox"] = np.divide(entry["bbox"], WIDE * 2).tolist()
        entries.append(entry)
    return made_content({n: f"{n}.png" for n in range(4)}, entries, {1: "a"}, WIDE)


def plain_boxes(count: int = 40, *removed: str) -> dict:
    return boxes_of("[x, y, width, height]", count, *removed)


@pytest.mark.parametrize("removed", [("area",), ("area", "segmentation")])
@pytest.mark.parametrize(
    ("form", "converted"),
    [
        ("corners", "[x0, y0, x1 - x0, y1 - y0]"),
        ("centre", "[x - width / 2, y - height / 2, width, height]"),
        (SHARES + "[x, y, width, height]", "times the image's width"),
        (SHARES + "corners", "times the image's width"),
        (SHARES + "centre", "times the image's width"),
    ],
)
def test_another_form_is_refused_by_its_name_and_how_to_convert_it(read, form, converted, removed):
    report = read(boxes_of(form, 40, *removed)).report
    assert set(findings(report)) == {kinds.FORM} and report.findings[kinds.FORM].count == 40
    assert form.split()[0] in report.refusal() and converted in report.refusal()


@pytest.mark.parametrize("removed", [(), ("area",), ("segmentation",)])
def test_boxes_of_cocos_form_are_no_other(read, removed):
    content = plain_boxes(200, *removed)
    assert findings(read(content).report) == {}
    for entry in content["annotations"][:10]:  # over the border by far, as many as are refused
        entry["bbox"][2] = 195
        entry.pop("segmentation", None)
    report = read(content).report
    assert kinds.FORM not in report.findings and kinds.OUTSIDE in report.findings


@pytest.mark.parametrize("form", ["corners", "[x, y, height, width]"])
def test_polygons_name_a_form_of_which_all_boxes_lie_in_their_images(read, form):
    """Each of these boxes holds most of its object, so that none by itself shows the form."""
    content = plain_boxes()
    for number, entry in enumerate(content["annotations"], 1):
        box = [40 + number, 30, 50, 40]
        entry |= annotation(number, number % 4, box) | {"bbox": FORMS[form](*box)}
    report = read(content).report
    assert set(findings(report)) == {kinds.FORM} and form in report.refusal()


@pytest.mark.parametrize("form", list(FORMS)[4:])
def test_boxes_that_contradict_their_polygons_are_refused(read, form):
    """In forms that nobody tells from others."""
    report = read(boxes_of(form)).report
    assert report.refusal() and kinds.BOX in report.findings


def test_one_box_of_another_form_is_left_out(read):
    """It contradicts its polygon, and the others say that it is alone."""
    content = plain_boxes(200)
    content["annotations"][7] = boxes_of(SHARES + "corners", 200)["annotations"][7]
    report = read(content).report
    assert report.usable == 199 and findings(report) == {kinds.BOX: 1}


# ----------------------------------------------------------------------------------------- crowds
@pytest.mark.parametrize(
    ("attributes", "crowds"),
    [({"occluded": False}, 0), ({"occluded": False, "is_crowd": True}, 2), (None, 2)],
)
def test_crowds_are_crowds(content, read, attributes, crowds):
    """CVAT marks each mask as one."""
    for entry in content["annotations"][:2]:
        entry |= {"segmentation": RUNS, "bbox": [0, 0, 11, 48], "iscrowd": 1}
        entry["attributes"] = attributes
    report = read(content).report
    assert (report.crowds, report.usable) == (crowds, 8 - crowds)
    assert findings(report) == ({} if crowds else {kinds.MEANT: 2})


# What is no annotation file: a text, or a change of a sound one, and what the message names
NOT_COCO = [
    *((t, "as JSON") for t in ("", "{", "\ufeff\x00", "[" * 10**6, "9" * 10**5)),
    ('"苹果"'.encode("gbk"), "GBK.*UTF-8"),
    *((t, "not in COCO format") for t in ("null", "{}", "NaN")),
    ("[]", "it holds a list"),
    ('{"images": [], "annotations": []}', "'categories', the value is None"),
    ('{"images": {}, "annotations": [], "categories": []}', "'images', the value is {}"),
    ('{"images": [1], "annotations": [], "categories": []}', "'images', entry 0 is 1"),
    ('{"images": [], "annotations": [], "categories": []}', "'images' is empty"),
    (put("images", id="one"), "id.*'one'"),
    (put("images", id=1.5), r"id.*1\.5"),
    (put("images", file_name=7), "file_name.*7"),
    (put("annotations", image_id=None), "image_id.*None"),
    (put("annotations", image_id=2**70), f"id.*{2**70}"),
    (put("categories", id=True), "id.*True"),
    *((put("categories", name=name), "name") for name in (5, None, "\ud800")),
    *(
        (put("categories", keypoints=names), "keypoints of category")
        for names in ("left eye", [1, 2], 3)
    ),
]


@pytest.mark.parametrize("number", range(len(NOT_COCO)))
def test_what_is_not_coco_format(content, write, number):
    json_file, images = write(content)
    fault, expected = NOT_COCO[number]
    if callable(fault):
        fault(content)
        fault = json.dumps(content)
    Path(json_file).write_bytes(fault if isinstance(fault, bytes) else fault.encode())
    with pytest.raises(DataError, match=rf"set\.json.*{expected}"):
        check_coco(json_file, images, files="none")


def test_images_are_opened(content, write, monkeypatch):
    json_file, images = write(content)
    assert f"{images}_missing" in check_coco(json_file, f"{images}_missing").refusal()
    Path(images, "10.png").unlink()
    data = Path(images, "20.png").read_bytes()
    Path(images, "20.png").write_bytes(data[:-3000])
    Image.new("RGB", (48, 64)).save(Path(images, "30.png"))
    report = check_coco(json_file, images)
    words = ("10.png does not exist", "30.png is 48x64", "20.png cannot be read")
    cases = [*report.findings[kinds.IMAGE].first, *report.findings[kinds.BROKEN].first]
    assert all(word in case for word, case in zip(words, cases, strict=True))
    # The head of a broken file may be sound; what is found in images is not kept with the report
    missing, broken = {kinds.IMAGE: 2}, {kinds.BROKEN: 1}
    # of a sample of two out of four it is not seen that the others are missing or wrong
    samples = ((4, "few", missing | broken), (3, "few", {}), (4, "sample", missing))
    for few_files, files, expected in (*samples, (4, "none", {})):
        monkeypatch.setattr(annotations, "_FEW_FILES", few_files)
        assert findings(check_coco(json_file, images, files=files)) == expected


def _save_turned(path: Path, number: int, size: tuple[int, int]) -> None:
    exif = Image.Exif()
    exif[274] = number
    Image.new("RGB", size).save(path, "JPEG", exif=exif)


@pytest.mark.parametrize("files", ["all", "sample"])
def test_labels_of_an_image_that_was_not_turned(content, write, files):
    """The size says so where the turn exchanges height and width; else somebody has to look."""
    json_file, images = write(content)
    _save_turned(Path(images, "10.png"), 6, (64, 48))
    _save_turned(Path(images, "20.png"), 3, (64, 48))
    _save_turned(Path(images, "30.png"), 8, (48, 64))  # labelled as it is shown
    report = check_coco(json_file, images, files=files)
    assert "10.png" in report.findings[kinds.IMAGE].first[0]
    assert "EXIF" in report.findings[kinds.IMAGE].first[0]
    assert findings(report) == {kinds.IMAGE: 1} | ({kinds.TURNED: 1} if files == "all" else {})


def test_runs_are_those_that_pycocotools_reads():
    """Of no length in any place, as lists and compressed."""
    random = np.random.default_rng(0)
    for _ in range(300):
        height, width = random.integers(1, 9, 2).tolist()
        runs = random.integers(0, 4, 9).tolist()
        runs.append(height * width - sum(runs))
        plain = {"size": [height, width], "counts": runs}
        usable = usable_runs(plain, height, width)
        if runs[-1] < 0 or not any(runs[1::2]):
            assert usable is None
            continue
        pixels = np.repeat(np.arange(len(runs)) % 2, runs).reshape(width, height).T
        compressed = mask_util.frPyObjects(plain, height, width)
        for mask in (usable, usable_runs(compressed, height, width)):
            assert mask == mask_util.encode(np.asfortranarray(pixels, np.uint8))
