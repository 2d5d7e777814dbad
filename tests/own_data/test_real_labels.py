"""Labels as people have them, through ``lambda-det check``: read right, or counted and named.

Each case was seen in bug reports of other projects or in public files.
"""

import base64
import json
import os
import unicodedata

import pytest
from PIL import Image

from lambda_det.detection.data.coco_format import read_json
from lambda_det.errors import DataError
from lambda_det.own_data import command_line
from lambda_det.own_data.held_out import Split, hold_out
from lambda_det.own_data.labels.formats import recognise
from tests.own_data.parts import (
    BOX,
    LINE,
    YAML,
    coco,
    cups,
    cvat,
    encoded,
    find_parts,
    image,
    labelme,
    make,
    shape,
    temporary_folder,
    via,
    voc,
)

WIDE = 70_000 * "x"  # more than the first part of a file


def checked(place, capsys):
    """The status of ``check``, and all that it says."""
    status = command_line.main([str(place)])
    output = capsys.readouterr()
    return status, output.out + output.err


def of_yolo(lines=LINE):
    return {"data.yaml": YAML, "a.png": "", "a.txt": lines}


def of_voc(*boxes, **more):
    things = [("cup", box) for box in boxes] or [BOX]
    return {"a.xml": voc("a.png", *things, **more), "a.png": ""}


def of_labelme(*shapes, **more):
    return {"a.json": labelme("a.png", *shapes, **more), "a.png": ""}


def of_cvat(old="", new=""):
    return {"a.xml": cvat(cups("a.png")).replace(old, new), "a.png": ""}


def both(*folders):
    """An image with a file of labels in each of some folders."""
    labels = {f"{name}/{name}.xml": voc(f"{name}.png", BOX) for name in folders}
    return labels | {f"{name}/{name}.png": "" for name in folders}


NAMES_OF_ONE_CUP = ["tea cup", "tea_cup", "Tea-Cup", "teacup", "tea\u200bcup", "ｔｅａ ｃｕｐ"]
JOINED = [shape(points=((20, 2), (x, 9)), group_id=1) for x in (25, 30, 35)]
ALONE = [
    shape(points=((1, 4 * y), (9, 29)), group_id=group)
    for y, group in enumerate([None, None, "", "", -1, -1])
]
TRIANGLES = [
    shape("polygon", ((x, y), (x + 5, y), (x + 5, y + 5))) for x in range(20) for y in range(10)
]
SMALL = [f"0 {n % 12 / 12 + 0.04} {n // 12 / 9 + 0.06} .04 .04\n" for n in range(101)]
OTHERS_OF_CVAT = (
    '<ellipse label="key" cx="20" cy="15" rx="8" ry="4" rotation="90"/>'
    '<cuboid label="key" xtl1="1" ytl1="1" xbl1="1" ybl1="9" xtr1="9" ytr1="1" xbr1="9" ybr1="9" '
    'xtl2="4" ytl2="0" xbl2="4" ybl2="8" xtr2="12" ytr2="0" xbr2="12" ybr2="8"/>'
    '<polyline label="key" points="1,1;2,2"/>'
)
EMPTY_MASK = base64.b64encode(encoded(Image.new("1", (11, 6)))).decode()
POLYGON = "<object><name>x</name><polygon><pt><x>1</x><y>2</y></pt></polygon></object>"
VIA = via(cups("a.png"))
OUTLINE = json.dumps(
    {
        "b.png9": {
            "filename": "b.png",
            "regions": [
                {
                    "shape_attributes": {
                        "name": "polygon",
                        "all_points_x": [1, 9],
                        "all_points_y": [1, 9, 5],
                    },
                    "region_attributes": {"kind": "cup"},
                }
            ],
        },
        "c.png9": {"filename": "c.png", "regions": []},
    }
)
LYING = Image.Exif()
LYING[274] = 6  # EXIF's orientation
NFD, NFC = (unicodedata.normalize(form, "größe") for form in ("NFD", "NFC"))
# Files, the status of check, and words of its output; "! " before a word: it is not there
# a file of labels of an image a.png, in the folder of each part
OF_A_PART = {
    "VIA": ("via.json", VIA),
    "CVAT": ("a.xml", cvat(cups("a.png"))),
    "Pascal VOC": ("a.xml", voc("a.png", BOX)),
    "LabelMe": ("a.json", labelme("a.png")),
    "COCO": ("a.json", coco(cups("a.png"))),
    "YOLO": ("a.txt", LINE),
}


def of_parts(form, *labelled):
    """Images of one name in the folders of three parts, of which some have labels."""
    name, text = OF_A_PART[form]
    files = {f"{part}/a.png": "" for part in ("train", "val", "test")}
    names = {"data.yaml": YAML + "train: train\nval: val\ntest: test\n"} if form == "YOLO" else {}
    return {**files, **names, **{f"{part}/{name}": text for part in labelled}}


CASES = {
    **{
        f"{form} whose labels of {lost} are lost, beside a test part without labels": (
            of_parts(form, kept),
            1,
            f"1 image of {lost} that no labels name",
            "1 image of test that no labels name",
            f"! of {kept} without",
            "! (test)",
        )
        for form in OF_A_PART
        for lost, kept in (("train", "val"), ("val", "train"))
    },
    **{
        f"{form} with a test part without labels": (
            of_parts(form, "train", "val"),
            0,
            "1 image of test that no labels name",
            "! of val without",
            "! call the folder otherwise",
            "! (test)",
            "! may be lost",
        )
        for form in OF_A_PART
    },
    "YOLO with a list of names and a test part without labels": (
        {"classes.txt": "cup\n", **of_parts("YOLO", "train", "val"), "data.yaml": ""},
        0,
        "1 image of test that no labels name",
        "! (test)",
        "! may be lost",
    ),
    "images without labels that are called as those of another part": (
        of_parts("VIA", "train", "val"),
        0,
        "1 x image without labels of this format",
    ),
    "drawings of the labels in a folder of no part": (
        {**of_parts("LabelMe", "train", "val", "test"), "drawn/a.png": "", "train/drawn/a.png": ""},
        0,
        "! without labels",
        "! no labels name",
    ),
    # --------------------------------------------------------- formats by their parse
    "LabelMe whose shapes come last": (of_labelme(flags=WIDE), 0, "labels of LabelMe", "1 cup"),
    "Pascal VOC behind a long comment": (
        of_voc() | {"a.xml": f"<!-- {WIDE} -->{voc('a.png', BOX)}"},
        0,
        "labels of Pascal VOC",
    ),
    "LabelMe with words of COCO in its text": (
        of_labelme(flags={"images": [], "annotations": []}),
        0,
        "labels of LabelMe",
    ),
    "data.yaml in one line": (
        of_yolo() | {"data.yaml": "{path: ., names: [cup, key]}"},
        0,
        "labels of YOLO",
    ),
    "a project of VIA without settings, and an image without regions": (
        {
            "a.json": f'{{"_via_img_metadata": {VIA[:-1]}, "b": {{"filename": "b.png"}}}}}}',
            "a.png": "",
            "b.png": "",
        },
        0,
        "labels of VIA",
        "1 cup",
        "2 images",
    ),
    "Pascal VOC with a namespace behind blank lines, whose name has another letter case": (
        {
            "A.xml": f'\n\n<?xml version="1.0"?>{voc("a.png", BOX)}'.replace(
                "<annotation>", '<annotation xmlns="x:y">'
            ),
            "a.png": "",
        },
        0,
        "labels of Pascal VOC",
    ),
    "labels of two formats": (
        of_voc() | {"b.json": coco(cups("a.png"))},
        0,
        "labels of COCO are read, and not others such as",
        "a.xml of Pascal VOC",
        "! alone",
    ),
    # --------------------------------------------------------- sizes that labels state
    "VOC whose training part has the classes of val in a file that is cut": (
        {
            **{"train/a.png": "", "train/b.png": "", "val/c.png": ""},
            "train/a.xml": voc("a.png", BOX),
            "train/b.xml": voc("b.png", BOX).replace("cup", "mug")[:-9],
            "val/c.xml": voc("c.png", BOX).replace("cup", "mug"),
        },
        1,
        "train/b.xml cannot be read",
        "! of none of these",
    ),
    "VOC of an image that was made smaller": (of_voc(size=(80, 60)), 1, "80x60", "40x30"),
    "LabelMe of an image that was made smaller": (of_labelme(imageWidth=80), 1, "80x30", "40x30"),
    "CVAT of an image that was made smaller": (of_cvat('"40"', '"80"'), 1, "80x30", "40x30"),
    # --------------------------------------------------------- forms of boxes
    "YOLO with corners": (of_yolo("0 .1 .1 .9 .9"), 1, "1 x box in another form", "corners"),
    "YOLO in pixels": (of_yolo("0 20 15 16 18"), 1, "like [x, y, width, height] or centre and"),
    "YOLO with some wrong lines": (
        of_yolo("7 .5 .5 1 1\n0 0,5 .5 1 1\n0 .5 .5 1\n0 20 15 9 9\n0 nan .5 1 1\n" + LINE * 40),
        1,
        "4 x labels that cannot be read",
        "line 2 cannot be read",
    ),
    "VOC with shares of 1": (of_voc((0.1, 0.2, 0.5, 0.7)), 1, "shares of 1", "corners in pixels"),
    "VOC with width and height in the place of corners": (
        of_voc((20, 10, 12, 15), (1, 2, 11, 7)),
        1,
        "look like [x, y, width, height]",
    ),
    "VOC with reversed corners": (
        of_voc((11, 7, 1, 2), (1, 2, 11, 7)),
        1,
        "or like corners that are reversed",
    ),
    "VOC with boxes of nothing": (
        of_voc((0, 0, 0, 0), (1, 0, 0, 1)),
        1,
        "2 x object without a usable box",
        "! shares of 1; write",
    ),
    "LabelMe with polygons and a slip of the mouse": (
        of_labelme(shape(points=((0, 0), (0.7, 0.4))), *TRIANGLES),
        1,
        "200 can be trained on",
        "1 x object without a usable box",
        "! another form",
    ),
    "VOC without a size": (of_voc(size=(0, 0)), 0, "1 cup"),
    # --------------------------------------------------------- images and their names
    "YOLO with labels of images that are not read": (
        {
            "data.yaml": YAML + "train: images/train\n",
            **dict.fromkeys([f"labels/train/{name}.txt" for name in "abcd"], LINE),
            **{"images/train/a.png": "", "images/train/b.psd": "x", "images/train/c.heic": "x"},
        },
        1,
        "3 x labels without an image",
        "b.txt",
        "c.heic",
    ),
    "YOLO with endings in capital letters": (
        of_yolo() | {"b.png": "", "b.TXT": LINE},
        0,
        "2 images with 2 objects",
        "! without a label",
    ),
    "folders whose names have a word for a part and others": (
        both("cups", "test_tubes"),
        0,
        "test_tubes are no parts",
        "2 images",
    ),
    "LabelMe for half of the images and YOLO for the others": (
        of_labelme() | {"b.png": "", "b.txt": LINE, "c.png": ""},
        1,
        "1 image with those alone",
        "b.png",
    ),
    "COCO, and the same image with labels of YOLO": (
        {
            "train.json": coco(cups("a.png")),
            **{"a.png": "", "again/b.png": encoded(image("a.png")), "again/b.txt": LINE},
        },
        0,
        "and not others",
        "! with those alone: ",
        "No problem was found",
    ),
    "images of telephones and cameras": (
        of_yolo() | {"a.dng": "x", "b.heic": "x", "c.nef": "x"},
        1,
        "2 images of formats that are not read",
        "b.heic",
    ),
    "the XML of LabelMe's old page": (
        {"a.xml": f"<annotation>{POLYGON}</annotation>", "a.png": ""},
        2,
        "LabelMe's old page",
        "a.xml, line 1",
    ),
    "images none of which is read": (
        {"data.yaml": YAML, "a.psd": "x", "a.txt": LINE},
        2,
        "of 0 images",
        "1 .psd",
    ),
    "VOC with an image that is there and not read": (
        {"a.xml": voc("a.psd", BOX), "a.psd": "x"},
        2,
        "'a.psd'",
        "JPEG, PNG",
    ),
    "YOLO with labels of other letters": (
        of_yolo() | {"B.png": "", "b.txt": LINE},
        1,
        "1 x labels without an image",
        "b.txt",
    ),
    # as in the whiteflies of SmartFarming: Images and Annotations with a folder for each part
    "YOLO with labels far from the images": (
        {
            **{f"Images/{part}/{part[:2]}.png": "" for part in ("Test", "Train and Validation")},
            **{
                f"Annotations/{part}/YOLO/{name}.txt": text
                for part in ("Test", "Train and Validation")
                for name, text in ((part[:2], LINE), ("classes", "cup\n"))
            },
            "Images/Test/nothing.png": "",
            "Annotations/Test/YOLO/nothing.txt": "",
        },
        0,
        "set (train)\n",
        "set (test)\n",
        "found by the name",
        "1 x empty label file",
        "! without a label file",
    ),
    # as in feral cats of Roboflow Universe, which were cut into folders of 500 for the upload
    "YOLO with folders images_1 and labels_1, beside labels in usual folders": (
        {
            "classes.txt": "cup\n",
            **{f"train/images_{n}/{n}.png": "" for n in range(3)},
            **{f"train/labels_{n}/{n}.txt": LINE * n for n in range(3)},
            **{"valid/images/v.png": "", "valid/labels/v.txt": LINE},
        },
        1,
        "4 images with 4 objects",
        "1 x empty label file",
        "! without a label file",
        "! without an image that",
        "! found by the name",
    ),
    "YOLO with labels of two parts far from the images, of which one was lost": (
        {
            "data.yaml": YAML + "train: a\nval: b\n",
            **{"a/1.png": "", "b/2.png": "", "b/3.png": ""},
            **{f"marks/{name}.txt": LINE for name in "1234"},
        },
        1,
        "1 x labels without an image",
        "marks/4.txt",
    ),
    "YOLO with background, and a prediction of it": (
        {
            "data.yaml": YAML + "train: images\n",
            **{"images/a.png": "", "labels/a.txt": LINE, "images/b.png": ""},
            "runs/predict/labels/b.txt": LINE,
        },
        1,
        "1 x image without a label file",
        "1 annotation",
    ),
    "YOLO with two labels of an image far from it": (
        {
            "Images/a.png": "",
            **{f"Annotations/{by}/a.txt": LINE for by in ("human", "machine")},
            "Annotations/human/classes.txt": "cup\n",
        },
        2,
        "Images/a.png has 2 files of labels",
        "human/a.txt",
        "machine/a.txt",
        "--train",
    ),
    "YOLO with an image called as one of another part": (
        {
            "data.yaml": YAML + "train: one/images\nval: two/images\n",
            **{"one/images/a.png": "", "two/images/a.png": "", "two/images/b.png": ""},
            **{"one/labels/a.txt": LINE, "two/labels/b.txt": LINE},
        },
        1,
        "1 x image without a label file",
    ),
    "LabelMe with a folder of images without labels": (
        {"train/a.json": labelme("a.png"), "train/a.png": "", "val/b.png": "", "val/c.png": ""},
        1,
        "2 x image without labels",
        "val/b.png",
        "2 x label file that may be lost",
        "2 of 2 images have no label file",
    ),
    # in all, a twelfth has none
    "VOC whose files of labels were lost in a part": (
        {
            **{f"train/{n}.xml": voc(f"{n}.png", BOX) for n in range(3)},
            **{f"val/{n}.xml": voc(f"{n}.png", BOX) for n in range(4, 12)},
            **{f"{'train' if n < 4 else 'val'}/{n}.png": "" for n in range(12)},
        },
        1,
        "1 x image without labels",
        "1 x label file that may be lost",
        "1 of 4 images have no label file",
    ),
    "VOC with a tenth of the images without labels": (
        {
            **{f"{n}.xml": voc(f"{n}.png", BOX) for n in range(9)},
            **{f"{n}.png": "" for n in range(10)},
        },
        0,
        "1 x image without labels",
        "! lost",
    ),
    "VOC with drawings of its labels": (
        {
            "Annotations/a.xml": voc("a.jpg", BOX),
            **{"JPEGImages/a.jpg": "", "SegmentationClass/a.png": ""},
        },
        0,
        "! without labels",
    ),
    "VIA whose part to evaluate on has no classes": (
        {
            **{"train/t.json": VIA, "train/a.png": "", "val/b.png": ""},
            "val/v.json": via({"b.png": [("", BOX[1])]}),
        },
        1,
        "objects of object",
        "--single-class",
    ),
    "YOLO with a picture among the labels": (
        {
            "data.yaml": YAML + "train: images\n",
            **{"images/a.png": "", "labels/a.txt": LINE, "labels/plot.png": ""},
        },
        0,
        "1 image",
    ),
    "YOLO with an image that EXIF turns": (
        {"data.yaml": YAML, "a.jpg": encoded(image(), "jpg", exif=LYING), "a.txt": LINE},
        1,
        "1 x image that its EXIF data turn",
    ),
    "YOLO with notes beside the labels": (
        of_yolo() | {"notes.txt": "1 2\n", "more.txt": '{"shapes": []}', "empty.txt": ""},
        0,
        "! without an image",
        "! not others",
    ),
    "CVAT without an image": (
        {"a.xml": cvat(cups("a.png", "b.png", "c.png")), "a.png": ""},
        1,
        "2 x labels without an image",
        "a.xml: b.png",
    ),
    "YOLO of macOS": ({"data.yaml": YAML, f"{NFD}.png": "", f"{NFC}.txt": LINE}, 0, "1 cup"),
    "a folder of macOS in data.yaml": (
        {"data.yaml": f"{YAML}train: {NFC}\n", f"{NFD}/a.png": "", f"{NFD}/a.txt": LINE},
        0,
        "1 cup",
    ),
    "folders that programs and systems make": (
        of_yolo()
        | dict.fromkeys([".ipynb_checkpoints/b.png", "__MACOSX/a.png", "@eaDir/a.png"], ""),
        0,
        "1 image",
    ),
    "CVAT with images of two folders, of another machine": (
        {"a.xml": cvat(cups("/me/cam1/0.png", "/me/cam2/0.png")), "cam1/0.png": ""},
        2,
        "/me/cam2/0.png and ",
        "/me/cam1/0.png both name",
        "cam1/0.png",
    ),
    # names of images that are not there are of the time before they were renamed
    "LabelMe of a renamed image": (
        {"10.json": labelme("old.jpg"), "10.jpg": ""},
        0,
        "1 x labels that name another image",
        "old.jpg, and 10.jpg is taken",
    ),
    "VOC of another image that is there": (
        {"a.png": "", "b.png": "", "a.xml": voc("b.png", BOX)},
        1,
        "a.xml names b.png",
    ),
    # --------------------------------------------------------- objects
    "more than 100 objects": (
        of_yolo("".join(SMALL)),
        0,
        "at most 101",
    ),
    "an object without a class": (of_labelme(shape(label=None)), 2, "a.json: shape 0", "no name"),
    "two classes of YOLO with one name": (
        of_yolo() | {"data.yaml": "names: [cup, cup]\n"},
        1,
        "classes whose names are the same",
        "0, 1",
    ),
    "classes that differ by their spelling": (
        of_labelme(*(shape(label=name) for name in NAMES_OF_ONE_CUP)),
        1,
        "1 x classes whose names",
        *NAMES_OF_ONE_CUP[:3],
    ),
    "a class of one object whose name is nearly another one": (
        of_labelme(
            *10 * [shape(label="wind turbine")],
            *(shape(label=name) for name in ("wind turbin", "key", "ketle")),
            *9 * [shape(label="kettle")],
            shape(label="wind turbine"),
        ),
        1,
        "1 x object of a class that has nearly the name of another one",
        "a.json: shape 10: 'wind turbin', beside many of 'wind turbine'",
        "! 'key'",
    ),
    "classes that numbers tell apart": (
        of_labelme(*(shape(label=name) for name in ("1-0", "10", *20 * ["cup 1"], "cup 12"))),
        1,
        "! classes whose names",
        "! nearly the name",
    ),
    "classes that a letter or a word of no tell apart": (
        of_labelme(
            *(shape(label=name) for name in 20 * ["cup of type A", "healthy"]),
            *(shape(label=name) for name in ("cup of type B", "unhealthy")),
        ),
        1,
        "! nearly the name",
    ),
    "CVAT's turned box whose corner is no number": (
        of_cvat("<box", '<box label="key" xtl="nan" ytl="1" xbr="9" ybr="9" rotation="30"/><box'),
        1,
        "1 x object without a usable box",
        "a.xml, line 1: bbox [nan, nan, nan, nan]",
    ),
    "CVAT's ellipses and cuboids": (
        of_cvat("<box", OTHERS_OF_CVAT + "<box"),
        1,
        "2 key",
        "1 x polyline: type of shape that is not read",
        "a.xml, line 1",
    ),
    "LabelMe's shapes of types that are not read": (
        of_labelme(shape(), shape("linestrip"), shape("point"), shape("linestrip")),
        0,
        "1 cup",
        "2 x linestrip: type",
        "a.json: shape 1",
        "1 x point: type",
    ),
    "VIA's shapes of types that are not read": (
        {"a.json": via({"a.png": [BOX, BOX]}).replace("rect", "point", 1), "a.png": ""},
        0,
        "1 cup",
        "1 x point: type of shape that is not read",
        "a.png, shape 0",
    ),
    "VIA with an outline that lacks an x": (
        {"a.json": VIA, "b.json": OUTLINE, **dict.fromkeys(("a.png", "b.png", "c.png"), "")},
        1,
        "1 x labels that cannot be read",
        "b.png, shape 0 cannot be read (all_points_x and all_points_y are of different lengths)",
        "The rest of the file was not read",
        "! without labels",
    ),
    **{
        f"{name}, of which one file is cut": (
            {**of_one, file: whole[: len(whole) - 9], "b.png": ""},
            1,
            "1 x labels that cannot be read",
            "! without labels",
        )
        for name, of_one, file, whole in (
            ("VIA", {"a.json": VIA, "a.png": ""}, "b.json", via(cups("b.png", "c.png"))),
            ("CVAT", of_cvat(), "b.xml", cvat(cups("b.png"))),
            ("Pascal VOC", of_voc(), "b.xml", voc("b.png", BOX)),
            ("LabelMe", of_labelme(), "b.json", labelme("b.png")),
        )
    },
    "VIA with an image without labels": (
        {"a.json": VIA, "a.png": "", "b.png": ""},
        0,
        "1 x image without labels of this format",
    ),
    "a type of shape with the signs of a terminal": (
        of_labelme(shape(), shape("\x1b[31m" + 100 * "x")),
        0,
        f"1 x \\x1b[31m{32 * 'x'}: type of shape that is not read",
    ),
    "LabelMe's empty mask with its rectangle": (
        of_labelme(shape("mask", mask=EMPTY_MASK), shape("mask", ((5, 5), (20, 20)), mask=None)),
        0,
        "2 x empty mask",
        "2 cup",
    ),
    "VOC's difficult objects": (
        of_voc(more="<difficult>1</difficult>"),
        0,
        "1 x object marked as difficult",
        "1 cup",
    ),
    "YOLO's classes as numbers with a point": (
        of_yolo("0.000000 .5 .5 .5 .5\n1.0 .5 .5 .2 .2\n"),
        0,
        "1 cup",
        "1 key",
    ),
    "half a class of YOLO, and a comment": (
        of_yolo(f"0.5 .5 .5 .5 .5\n#{LINE}"),
        1,
        "a.txt, line 1",
        "a.txt, line 2",
    ),
    # --------------------------------------------------------- texts
    "UTF-16 labels": (of_yolo(LINE.encode("utf-16")), 2, "a.txt is text in UTF-16"),
    "UTF-16 without a mark": (of_yolo(LINE.encode("utf-16-le")), 2, "a.txt is text in UTF-16"),
    "GBK names": (
        {"classes.txt": "杯\n钥匙\n".encode("gbk"), "a.png": "", "a.txt": LINE},
        2,
        "classes.txt",
        "save it as UTF-8",
    ),
    "GBK XML that says so": (
        {
            "a.xml": f'<?xml version="1.0" encoding="GBK"?>{voc("猫.png", BOX)}'.encode("gbk"),
            "猫.png": "",
        },
        0,
        "1 cup",
    ),
    "GBK XML that does not": (
        {"a.xml": voc("杯.png", BOX).encode("gbk"), "杯.png": ""},
        2,
        "a.xml",
        "save it as UTF-8",
    ),
    "a list of names that is called labels.txt": (
        {"labels.txt": "cup\nkey\n", "images/a.png": "", "labels/a.txt": LINE},
        2,
        "labels.txt may be it",
        "classes.txt",
    ),
    "YOLO without names": (
        {"images/a.png": "", "labels/a.txt": LINE},
        2,
        "look like YOLO's labels",
        "write it to",
        "set/classes.txt",
    ),
    "a table": ({"a.csv": "a,b\n", "a.png": ""}, 2, "1 .csv"),
    # --------------------------------------------------------- data.yaml
    "a path of train that is not there": (
        {"data.yaml": YAML + "train: imagse\nval: val\n", "val/a.png": "", "images/b.png": ""},
        2,
        "train names imagse",
        "write the folder",
        "images, val",
    ),
    "some names of the classes of three parts": (
        {
            "classes.txt": "cup\n",
            **of_parts("YOLO", "train", "val", "test"),
            **{"data.yaml": "", "val/a.txt": 2 * f"7{LINE[1:]}"},
        },
        1,
        "2 x labels that cannot be read, in all parts",
    ),
    "a list of lists in the place of a path": (
        {"data.yaml": YAML + "train: train\nval: [[val]]\n", "train/b.png": ""},
        2,
        "value of val",
        "list",
    ),
    "lists of images without a file that names them": (
        {
            "classes.txt": "cup\n",
            **{"train.txt": "images/a.png\n", "val.txt": "\nimages/b.png\n"},
            **{"images/a.png": "", "images/b.png": "", "labels/a.txt": LINE, "labels/b.txt": LINE},
            "images/c.png": "",
        },
        0,
        "(train)",
        "(val)",
        "1 image",
        "! 2 images",
    ),
    "nothing to train on": (
        {"data.yaml": YAML + "val: val\n", "val/a.png": "", "train/b.png": ""},
        2,
        "names images for val",
        "train",
    ),
    "two parts to evaluate on": (both("val", "test"), 2, "val and test", "--train"),
    "a path of another machine whose end is another folder": (
        {"data.yaml": YAML + "train: /me/set/train/images\nval: val\n", "images/a.png": ""},
        2,
        "train names /me/set/train/images",
    ),
    "lists of names in the folders of the labels, as labelImg writes them": (
        {
            **{f"labels/{part}/classes.txt": "cup\n" for part in ("train", "val")},
            **{f"images/{part}/{part}.png": "" for part in ("train", "val")},
            **{f"labels/{part}/{part}.txt": LINE for part in ("train", "val")},
        },
        0,
        "set (val)\n",
    ),
    "lists of names that differ": (
        {"x/classes.txt": "cup\n", "y/classes.txt": "key\n", "x/a.png": "", "x/a.txt": LINE},
        2,
        "name one of them",
    ),
    "a list of labelImg in another order than data.yaml's": (
        {
            **{"data.yaml": YAML + "train: images\n", "labels/classes.txt": "key\ncup\n"},
            **{"images/a.png": "", "labels/a.txt": LINE},
        },
        1,
        "1 x list of names",
        "class 0 is 'cup', and 'key' in",
        "classes.txt",
    ),
    "lists with more of the same names": (
        of_yolo() | {"classes.txt": "Cup \nkey\nfork\n", "hyp.yaml": "lr: 1\n"},
        0,
        "1 cup",
        "! list of names",
    ),
    "empty label files and missing ones": (
        of_yolo() | {"b.png": "", "b.txt": "", "c.png": ""},
        1,
        "2 x image without an object",
        "1 x empty label file",
        "1 x image without a label file",
        "c.png",
    ),
    "one label file of two images": (
        of_yolo() | {"a.jpg": ""},
        1,
        "2 cup",
        "1 x label file of two images",
        "a.jpg and ",
    ),
    # --------------------------------------------------------- classes and shapes
    "VIA whose classes are of two attributes": (
        {
            "a.json": via({"a.png": [("red", BOX[1]), ("", BOX[1]), BOX, BOX]}).replace(
                "kind", "colour", 1
            ),
            "a.png": "",
        },
        1,
        "2 x object whose class is of another",
        "a.png, shape 1: it has no class",
    ),
    "LabelMe with shapes of one group": (
        of_labelme(*JOINED, shape(group_id=2)),
        0,
        "2 cup",
        "1 x shapes of one class and group",
        "shape 0 and 2 more",
    ),
    "LabelMe with shapes of no group": (of_labelme(*ALONE), 0, "6 cup", "! of one class and group"),
    "COCO's file of instances and another one": (
        {
            **{f"{name}.json": coco(cups(f"{name}.png")) for name in ("instances_train", "b")},
            **{"instances_train.png": "", "b.png": ""},
        },
        0,
        "1 image",
        "not used beside instances",
        "b.json",
    ),
    # --------------------------------------------------------- copies
    "COCO's test part with an image without an id": (
        {
            **{f"{part}/{part}.png": "" for part in ("train", "val", "test")},
            **{f"{part}/a.json": coco(cups(f"{part}.png")) for part in ("train", "val")},
            "test/a.json": coco(cups("test.png")).replace('"id": 1, "file_name"', '"file_name"'),
        },
        2,
        "test/a.json is not in COCO format: of 'images', the id of entry 0",
    ),
    "the same image in two parts": (
        both("train", "val")
        | {f"{part}/{part}.png": encoded(image()) for part in ("train", "val")},
        1,
        "1 image in two parts",
        "val.png as ",
        "--group-by",
    ),
    "a part that others are a part of": (
        {
            "data.yaml": YAML + "train: images\nval: images/val\n",
            **{"images/a.png": "", "images/val/b.png": "", "labels/a.txt": LINE},
        },
        1,
        "1 image in two parts",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_check_says(case, tmp_path, capsys, caplog):
    caplog.set_level("INFO")
    files, status, *words = CASES[case]
    found, output = checked(make(tmp_path / "set", files), capsys)
    output += caplog.text
    assert found == status, output
    for word in words:
        assert (word.removeprefix("! ") in output) is not word.startswith("! "), output


def test_what_all_parts_share_is_said_once(tmp_path, capsys):
    place = make(tmp_path, CASES["some names of the classes of three parts"][0])
    assert checked(place, capsys)[1].count("labels that cannot be read") == 1


# --------------------------------------------------------------------------------- other matters
@pytest.mark.posix
def test_a_folder_counts_by_its_own_name_and_not_by_a_link(tmp_path):
    """Else the images of val were trained on as those of a folder without a word."""
    make(tmp_path, both("val", "scans"))
    (tmp_path / "latest").symlink_to("val")
    _, (train, val) = find_parts(tmp_path)
    names = [[i["file_name"] for i in read_json(p.labels)["images"]] for p in (train, val)]
    assert names == [["scans/scans.png"], ["val/val.png"]]


@pytest.mark.parametrize("inner", ["[*{}, *{}]", "{{<<: [*{}, *{}]}}"])
def test_a_yaml_of_nested_aliases_is_refused_at_once(inner, tmp_path):
    """Its text would have more letters than any memory."""
    lines = ["a0: &a0 {x: y}"]
    lines += [f"a{n}: &a{n} " + inner.format(f"a{n - 1}", f"a{n - 1}") for n in range(1, 60)]
    for key in ("names: [*a59]", "names: [x]\ntrain: *a59"):
        make(tmp_path, {"data.yaml": "\n".join([*lines, key]), "a.png": ""})
        with pytest.raises(DataError, match=r"data\.yaml"):
            find_parts(tmp_path)
    make(tmp_path, {"data.yaml": "\n".join([*lines, "names: {0: x}\npath: *a59"])})
    find_parts(tmp_path)


@pytest.mark.parametrize("place", ["", "D:\\me\\"])
def test_copies_of_one_image_are_held_out_together(place, tmp_path):
    """By their names, of which tests/detection/data/test_copies.py has more, and by their bytes."""
    roboflow = [[f"p{n}_jpg.rf.{n * m + 100000}.jpg" for m in (1, 2, 3)] for n in range(20)]
    same = [[f"copy {n} of {m}.jpg" for n in range(3)] for m in range(20)]
    for number, names in enumerate(same):
        make(tmp_path, dict.fromkeys(names, encoded(image(f"{number}"), "jpg")))
    for names in roboflow:
        make(tmp_path, dict.fromkeys(names, ""))
    groups = [*roboflow, *same]
    names = [name for group in groups for name in group]
    make(tmp_path, {"a.json": coco(cups(*(place + name for name in names)))})
    for split in (Split(0.3), Split(0.3, stratify=True), Split(0.3, group_by="^p[0-9]")):
        train, val = (
            {image["file_name"].removeprefix(place) for image in read_json(file)["images"]}
            for file in hold_out(
                str(tmp_path / "a.json"), str(tmp_path), split, folder=temporary_folder()
            )
        )
        assert train and val
        assert all(train.issuperset(group) or val.issuperset(group) for group in groups)


def test_a_file_that_changes_is_recognised_again(tmp_path):
    make(tmp_path, {"a.json": labelme("a.png")})
    assert recognise(tmp_path)[0] == "LabelMe"
    make(tmp_path, {"a.json": coco(cups("a.png"))})
    os.utime(tmp_path / "a.json", (1, 1))
    assert recognise(tmp_path)[0] == "COCO"


@pytest.mark.parametrize(
    ("labels", "names", "images", "folder"),
    [
        # test_image_folder.py has more names
        ("a.json", ["D:\\set\\images\\a.png"], ["images/a.png"], "images"),
        # b.png is missing, and there are two of a.png
        ("x.json", ["a.png", "b.png"], ["a.png", "small/a.png"], ""),
        ("valid/x.json", ["a.png", "b.png"], ["valid/a.png", "valid/more/b.png"], "valid"),
    ],
)
def test_the_folder_of_coco_s_images(labels, names, images, folder, tmp_path):
    make(tmp_path, {labels: coco(cups(*names)), **dict.fromkeys(images, "")})
    _, (part,) = find_parts(tmp_path)
    assert part.images == str(tmp_path / folder)


def test_coco_s_images_in_several_folders_are_refused_with_both(tmp_path):
    make(tmp_path, {"a.json": coco(cups("a.png")), "depth/a.png": "", "rgb/a.png": ""})
    with pytest.raises(DataError, match=r"depth.*rgb"):
        find_parts(tmp_path)
