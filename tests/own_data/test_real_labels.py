"""Labels as people have them, through ``lambda-det check``: read right, or counted and named.

Each case was seen in bug reports of other projects or in public files.
"""

import base64
import io
import json
import os
import unicodedata
import zlib

import numpy as np
import pytest
from PIL import Image

from lambda_det.detection.data.coco_format import read_json
from lambda_det.errors import DataError
from lambda_det.own_data import command_line
from lambda_det.own_data.held_out import Split, hold_out
from lambda_det.own_data.labels import recognise
from tests.own_data.parts import find_parts, temporary_folder

YAML = "names: [cup, key]\n"
LINE = "0 .5 .5 .5 .5\n"
WIDE = 70_000  # more than the first part of a file


def image(name, size=(40, 30)):
    """An image unlike that of any other name."""
    noise = np.random.default_rng(zlib.crc32(name.encode())).integers(0, 255, (3, 4, 3), np.uint8)
    return Image.fromarray(noise).resize(size)


def encoded(image, ending="png", **options):
    buffer = io.BytesIO()
    image.save(buffer, {"jpg": "JPEG", "JPG": "JPEG", "png": "PNG"}[ending], **options)
    return buffer.getvalue()


def make(root, files):
    """Files of a data set; an image without content is made by its name."""
    for name, content in files.items():
        file = root / name
        file.parent.mkdir(parents=True, exist_ok=True)
        ending = name.rpartition(".")[2]
        if not content and ending in ("png", "jpg", "JPG"):
            content = encoded(image(name), ending)
        file.write_bytes(content.encode() if isinstance(content, str) else content)
    return root


def voc(name, *boxes, size=(40, 30), more=""):
    objects = "".join(
        f"<object><name>cup</name>{more}<bndbox><xmin>{a}</xmin><ymin>{b}</ymin><xmax>{c}</xmax>"
        f"<ymax>{d}</ymax></bndbox></object>\n"
        for a, b, c, d in boxes
    )
    stated = f"<size><width>{size[0]}</width><height>{size[1]}</height></size>"
    return f"<annotation><filename>{name}</filename>{stated}\n{objects}</annotation>"


def cvat(*images):
    """Of names, with a box each."""
    box = '<box label="cup" xtl="1" ytl="2" xbr="11" ybr="7"/>'
    nodes = "".join(f'<image name="{name}" width="40" height="30">{box}</image>' for name in images)
    return f"<annotations>{nodes}</annotations>"


def shape(form="rectangle", points=((1, 2), (11, 7)), label="cup", **more):
    return {"label": label, "points": points, "shape_type": form, **more}


def labelme(name, *shapes, **more):
    content = {"imagePath": name, "imageWidth": 40, "imageHeight": 30, **more}
    return json.dumps({**content, "shapes": shapes or [shape()]})


def via(*names, has_class=True):
    box = {"name": "rect", "x": 1, "y": 2, "width": 10, "height": 5}
    region = {"shape_attributes": box, "region_attributes": {"kind": "cup"} if has_class else {}}
    return json.dumps({f"{n}9": {"filename": n, "regions": [region]} for n in names})


def coco(name, size=(40, 30), **more):
    image = {"id": 1, "file_name": name, "width": size[0], "height": size[1]}
    box = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 10, 5]}
    category = {"id": 1, "name": "cup"}
    return json.dumps({**more, "images": [image], "annotations": [box], "categories": [category]})


def checked(place, capsys):
    """The status of ``check``, and all that it says."""
    status = command_line.main([str(place)])
    output = capsys.readouterr()
    return status, output.out + output.err


BOX = (1, 2, 11, 7)
MANY = [(n % 12, n // 12) for n in range(101)]
NAMES_OF_ONE_CUP = ["tea cup", "tea_cup", "Tea-Cup", "teacup", "tea\u200bcup", "ｔｅａ ｃｕｐ"]
NO_GROUPS = list(enumerate([None, None, "", "", -1, -1]))
JOINED = [shape(points=((20, 2), (x, 9)), group_id=1) for x in (25, 30, 35)]
UPPER = encoded(image("lying", (30, 40)), "jpg")
LYING = Image.Exif()
LYING[274] = 6  # which makes an image of 30x40 one of 40x30
# Files, the status of check, and words of its output; "! " before a word: it is not there
CASES = {
    # --------------------------------------------------------- formats by their parse
    "LabelMe whose shapes come last": (
        {"a.json": labelme("a.png", flags={"x": "y" * WIDE}), "a.png": ""},
        (0, ["labels of LabelMe", "1 cup"]),
    ),
    "VIA with a long first image": (
        {
            "a.json": via("a.png").replace(
                '"regions"', f'"file_attributes": "{"x" * WIDE}", "regions"'
            ),
            "a.png": "",
        },
        (0, ["labels of VIA", "1 cup"]),
    ),
    "COCO behind long licenses": (
        {"a.json": coco("a.png", licenses=["x" * WIDE]), "a.png": ""},
        (0, ["labels of COCO", "1 cup"]),
    ),
    "Pascal VOC behind a long comment": (
        {"a.xml": f"<!-- {'x' * WIDE} -->" + voc("a.png", BOX), "a.png": ""},
        (0, ["labels of Pascal VOC", "1 cup"]),
    ),
    "data.yaml with its names last": (
        {"data.yaml": f"# {'x' * WIDE}\n{YAML}", "a.png": "", "a.txt": LINE},
        (0, ["labels of YOLO", "1 cup"]),
    ),
    "LabelMe with words of COCO in its text": (
        {"a.json": labelme("a.png", flags={"images": [], "annotations": []}), "a.png": ""},
        (0, ["labels of LabelMe"]),
    ),
    "data.yaml in one line": (
        {"data.yaml": "{path: ., names: [cup, key]}", "a.png": "", "a.txt": LINE},
        (0, ["labels of YOLO", "1 cup"]),
    ),
    "a project of VIA without settings, and an image without regions": (
        {
            "a.json": json.dumps(
                {"_via_img_metadata": {**json.loads(via("a.png")), "b": {"filename": "b.png"}}}
            ),
            **{"a.png": "", "b.png": ""},
        },
        (0, ["labels of VIA", "1 cup", "2 images"]),
    ),
    "Pascal VOC behind blank lines": (
        {"a.xml": f'\n\n<?xml version="1.0"?>{voc("a.png", BOX)}', "a.png": ""},
        (0, ["labels of Pascal VOC", "1 cup"]),
    ),
    "labels of two formats": (
        {"a.json": coco("a.png"), "b.xml": voc("a.png", BOX), "a.png": ""},
        (0, ["labels of COCO are read, and not others such as", "b.xml of Pascal VOC"]),
    ),
    # --------------------------------------------------------- sizes that labels state
    "VOC of an image that was made smaller": (
        {"a.xml": voc("a.png", BOX, size=(80, 60)), "a.png": ""},
        (1, ["80x60", "40x30"]),
    ),
    "LabelMe of an image that was made smaller": (
        {"a.json": labelme("a.png", imageWidth=80, imageHeight=60), "a.png": ""},
        (1, ["80x60", "40x30"]),
    ),
    "CVAT of an image that was made smaller": (
        {"a.xml": cvat("a.png").replace('"40"', '"80"').replace('"30"', '"60"'), "a.png": ""},
        (1, ["80x60", "40x30"]),
    ),
    "VOC of a tool that ignored EXIF": (
        {
            "a.xml": voc("a.jpg", BOX, size=(30, 40)),
            "a.jpg": encoded(image("lying", (30, 40)), "jpg", exif=LYING),
        },
        (1, ["30x40", "40x30"]),
    ),
    # --------------------------------------------------------- forms of boxes
    **{
        f"YOLO in the form {numbers}": (
            {
                "data.yaml": YAML,
                **dict.fromkeys([f"{number}.png" for number in range(5)], ""),
                **dict.fromkeys([f"{number}.txt" for number in range(5)], f"0 {numbers}\n"),
            },
            (1, ["5 x box in another form", words, "! over the border"]),
        )
        for numbers, words in {
            ".1 .1 .9 .9": "corners",
            ".1 .1 .8 .8": "shares of 1 of [x, y, width, height]",
            "20 15 16 18": "look like [x, y, width, height] or centre and size",
            "15 12 38 28": "look like corners",
            "50 50 40 60": "hundredths",
        }.items()
    },
    "VOC with shares of 1": (
        {"a.xml": voc("a.png", (0.1, 0.2, 0.5, 0.7)), "a.png": ""},
        (1, ["look like shares of 1", "corners in pixels"]),
    ),
    "VOC with width and height in the place of corners": (
        {"a.xml": voc("a.png", (20, 10, 12, 15), (1, 2, 11, 7)), "a.png": ""},
        (1, ["look like [x, y, width, height]"]),
    ),
    "VOC with reversed corners": (
        {"a.xml": voc("a.png", (11, 7, 1, 2), BOX), "a.png": ""},
        (1, ["or like corners that are reversed"]),
    ),
    "VOC with boxes of nothing": (
        {"a.xml": voc("a.png", (0, 0, 0, 0), (1, 0, 0, 1)), "a.png": ""},
        (1, ["2 x object without a usable box", "! shares of 1; write"]),
    ),
    "LabelMe with polygons and a slip of the mouse": (
        {
            "a.json": labelme(
                "a.png",
                shape(points=((0, 0), (0.7, 0.4))),
                *(
                    shape("polygon", ((x, y), (x + 5, y), (x + 5, y + 5)))
                    for x in range(20)
                    for y in range(10)
                ),
            ),
            "a.png": "",
        },
        (1, ["200 can be trained on", "1 x object without a usable box", "! another form"]),
    ),
    "CVAT with width and height in the place of corners": (
        {"a.xml": cvat("a.png").replace('xtl="1"', 'xtl="15"'), "a.png": ""},
        (1, ["look like [x, y, width, height]"]),
    ),
    "VOC with a size that cannot be, and boxes that can": (
        {"a.xml": voc("a.png", BOX, size=(1, 1)), "a.png": ""},
        (0, ["1 x labels whose size is too small"]),
    ),
    "VOC without a size": (
        {"a.xml": voc("a.png", BOX, size=(0, 0)), "a.png": ""},
        (0, ["! too small"]),
    ),
    # --------------------------------------------------------- images and their names
    "YOLO with labels of images that are not read": (
        {
            "data.yaml": YAML + "train: images/train\n",
            **dict.fromkeys([f"labels/train/{name}.txt" for name in "abcd"], LINE),
            **{"images/train/a.png": "", "images/train/b.psd": "x", "images/train/c.heic": "x"},
        },
        (1, ["3 x labels without an image", "b.txt", "c.heic"]),
    ),
    "YOLO with endings in capital letters": (
        {"data.yaml": YAML, "a.png": "", "a.TXT": LINE, "b.png": "", "b.txt": LINE},
        (0, ["2 images with 2 cup", "! without a label"]),
    ),
    "folders whose names have a word for a part and others": (
        {
            f"{d}/{d[0]}.{e}": labelme("a.png") if e == "json" else ""
            for d in ("cups", "test_tubes")
            for e in ("json", "png")
        },
        (0, ["test_tubes are no parts", "2 images"]),
    ),
    "LabelMe for half of the images and YOLO for the others": (
        {
            **{"a.png": "", "a.json": labelme("a.png"), "b.png": "", "b.txt": LINE},
            "c.png": "",
        },
        (1, ["1 image with those alone", "b.png"]),
    ),
    "COCO for one image and LabelMe for another one": (
        {"a.json": coco("a.png"), "a.png": "", "b.png": "", "b.json": labelme("b.png")},
        (1, ["1 image with those alone", "b.png"]),
    ),
    "images of telephones and cameras": (
        {"data.yaml": YAML, "a.png": "", "a.txt": LINE, "a.dng": "x", "b.heic": "x", "c.nef": "x"},
        (1, ["2 images of formats that are not read", "b.heic"]),
    ),
    "the XML of LabelMe's old page": (
        {
            "a.xml": "<annotation><filename>a.png</filename><object><name>x</name><polygon>"
            "<pt><x>1</x><y>2</y></pt></polygon></object></annotation>",
            "a.png": "",
        },
        (2, ["LabelMe's old page", "a.xml, line 1"]),
    ),
    "images none of which is read": (
        {"data.yaml": YAML, "a.psd": "x", "a.txt": LINE},
        (2, ["no image", "1 .psd"]),
    ),
    "VOC with an image that is there and not read": (
        {"a.xml": voc("a.psd", BOX), "a.psd": "x"},
        (2, ["'a.psd' is of no format that is read"]),
    ),
    "YOLO with labels of other letters": (
        {"data.yaml": YAML, "a.png": "", "a.txt": LINE, "B.png": "", "b.txt": LINE},
        (1, ["1 x labels without an image", "b.txt"]),
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
        },
        (0, ["set (train)\n", "set/Annotations/Test/YOLO\n", "found by the name", "! without"]),
    ),
    "YOLO with background, and a prediction of it": (
        {
            "data.yaml": YAML + "train: images\n",
            **{"images/a.png": "", "labels/a.txt": LINE, "images/b.png": ""},
            "runs/predict/labels/b.txt": LINE,
        },
        (0, ["1 x image without a label file", "1 annotation"]),
    ),
    "YOLO with two labels of an image far from it": (
        {
            "Images/a.png": "",
            **{
                f"Annotations/{by}/{name}.txt": text
                for by in ("human", "machine")
                for name, text in (("a", LINE), ("classes", "cup\n"))
            },
        },
        (2, ["Images/a.png has 2 files of labels", "human/a.txt", "machine/a.txt", "--train"]),
    ),
    "YOLO with an image called as one of another part": (
        {
            "data.yaml": YAML + "train: one/images\nval: two/images\n",
            **{"one/images/a.png": "", "two/images/a.png": "", "two/images/b.png": ""},
            **{"one/labels/a.txt": LINE, "two/labels/b.txt": LINE},
        },
        (0, ["1 x image without a label file"]),
    ),
    "LabelMe with a folder of images without labels": (
        {"train/a.json": labelme("a.png"), "train/a.png": "", "val/b.png": "", "val/c.png": ""},
        (0, ["2 x image without labels", "val/b.png"]),
    ),
    "VOC with drawings of its labels": (
        {
            **{"Annotations/a.xml": voc("a.jpg", BOX), "JPEGImages/a.jpg": ""},
            "SegmentationClass/a.png": "",
        },
        (0, ["! without labels"]),
    ),
    "VIA whose part to evaluate on has no classes": (
        {
            **{"train/t.json": via("a.png"), "train/a.png": ""},
            **{"val/v.json": via("b.png", has_class=False), "val/b.png": ""},
        },
        (1, ["1 x file whose shapes have no class", "objects of object", "--single-class"]),
    ),
    "YOLO with notes beside the labels": (
        {"data.yaml": YAML, "a.png": "", "a.txt": LINE, "notes.txt": "1 2\n", "empty.txt": ""},
        (0, ["! without an image"]),
    ),
    "VOC with an image that is not read": (
        {"a.xml": voc("a.png", BOX), "a.png": "", "b.xml": voc("b.psd", BOX), "b.psd": "x"},
        (1, ["1 x labels without an image", "b.xml: b.psd"]),
    ),
    "CVAT without an image": (
        {"a.xml": cvat("a.png", "b.png", "c.png"), "a.png": ""},
        (1, ["2 x labels without an image", "a.xml: b.png"]),
    ),
    "YOLO of macOS": (
        {
            "data.yaml": YAML,
            unicodedata.normalize("NFD", "größe.png"): "",
            unicodedata.normalize("NFC", "größe.txt"): LINE,
        },
        (0, ["1 cup"]),
    ),
    "VOC of macOS": (
        {unicodedata.normalize("NFD", "größe.png"): "", "x.xml": voc("größe.png", BOX)},
        (0, ["1 cup"]),
    ),
    "an ending in other letters": (
        {"a.xml": cvat("a.jpg"), "a.JPG": ""},
        (0, ["1 cup"]),
    ),
    "Jupyter's copies of images": (
        {
            "data.yaml": YAML,
            **{"a.png": "", "a.txt": LINE, ".ipynb_checkpoints/a-checkpoint.png": ""},
        },
        (0, ["1 image"]),
    ),
    "folders that systems make": (
        {
            **{"data.yaml": YAML, "a.png": "", "a.txt": LINE},
            **{"__MACOSX/a.png": "", "@eaDir/a.png": ""},
        },
        (0, ["1 image"]),
    ),
    "a folder of macOS in data.yaml": (
        {
            "data.yaml": YAML + unicodedata.normalize("NFC", "train: été\n"),
            unicodedata.normalize("NFD", "été/a.png"): "",
            unicodedata.normalize("NFD", "été/a.txt"): LINE,
        },
        (0, ["1 cup"]),
    ),
    "CVAT with images of two folders, of which one is there": (
        {"a.xml": cvat("cam1/0.png", "cam2/0.png"), "cam1/0.png": ""},
        (1, ["1 x labels without an image", "cam2/0.png"]),
    ),
    "LabelMe with an image of a folder that is not there": (
        {"a.json": labelme("cam2/0.png"), "cam1/0.png": ""},
        (2, ["cam2/0.png"]),
    ),
    "CVAT with images of two folders, of another machine": (
        {"a.xml": cvat("/me/cam1/0.png", "/me/cam2/0.png"), "cam1/0.png": ""},
        (2, ["/me/cam2/0.png and /me/cam1/0.png", "cam1/0.png"]),
    ),
    "CVAT with the folder of a subset that is not here": (
        {"a.xml": cvat("default/0.png"), "images/0.png": ""},
        (0, ["1 cup"]),
    ),
    "CVAT with a folder that is not here, and images in another one": (
        {"a.xml": cvat("monday/0.png"), "tuesday/0.png": ""},
        (2, ["'monday/0.png' is not below"]),
    ),
    "an image twice in a file of CVAT": (
        {"a.xml": cvat("a.png", "a.png").replace("cup", "key", 1), "a.png": ""},
        (2, ["a.png and a.png both name"]),
    ),
    "an image twice in a file of COCO, with its folder and without": (
        {
            "images/a.png": "",
            "a.json": json.dumps(
                {
                    **json.loads(coco("a.png")),
                    "images": [
                        {"id": number, "file_name": name, "width": 40, "height": 30}
                        for number, name in enumerate(["a.png", "images\\a.png"], 1)
                    ],
                }
            ),
        },
        (1, ["1 x id that is not listed, or is used twice", "has the image ids 1 and 2"]),
    ),
    "VIA's export as COCO": (
        {
            "images/a.png": "",
            "a.json": json.dumps(
                {
                    "images": [{"id": "1", "file_name": "a.png", "width": 0, "height": 0}],
                    "annotations": [
                        {
                            **{"id": 1, "image_id": "1", "category_id": 1, "iscrowd": 0},
                            "segmentation": [1, 2, 11, 2, 11, 7, 1, 7],
                            **{"area": 50, "bbox": [1, 2, 10, 5]},
                        }
                    ],
                    "categories": [{"id": 1, "name": "cup", "supercategory": "kind"}],
                }
            ),
        },
        (0, ["labels of COCO", "1 cup", "2 x entry", "its own is taken"]),
    ),
    "LabelMe with images of another machine": (
        {"labels/a.json": labelme("..\\photos\\a.png"), "images/a.png": ""},
        (0, ["1 image", "1 cup"]),
    ),
    "two files of labels for images of the same names": (
        {
            **{f"Annotations/{day}/0.xml": voc("0.png", BOX) for day in ("mon", "tue")},
            **{f"JPEGImages/{day}/0.png": "" for day in ("mon", "tue")},
        },
        (0, ["2 images", "2 cup"]),
    ),
    # --------------------------------------------------------- objects
    "more than 100 objects": (
        {
            **{"data.yaml": YAML, "a.png": ""},
            "a.txt": "".join(f"0 {x / 12 + 0.04} {y / 9 + 0.06} .04 .04\n" for x, y in MANY),
        },
        (0, ["at most 101", "1 x image with more than COCO's 100", "a.png, 40x30: 101"]),
    ),
    "one object twice": (
        {"data.yaml": YAML, "a.png": "", "a.txt": LINE + LINE + LINE.replace("0", "1", 1)},
        (1, ["1 x object that is in its image twice", "a.txt, line 2"]),
    ),
    "an object without a class": (
        {"a.json": labelme("a.png", shape(label=None)), "a.png": ""},
        (2, ["a.json: shape 0", "no name"]),
    ),
    "two classes of YOLO with one name": (
        {"data.yaml": "names: [cup, cup]\n", "a.png": "", "a.txt": LINE},
        (1, ["classes whose names are the same", "0, 1"]),
    ),
    "another number of classes than names": (
        {"data.yaml": YAML + "nc: 3\n", "a.png": "", "a.txt": LINE},
        (1, ["nc is 3"]),
    ),
    "classes that differ by their spelling": (
        {
            "a.json": labelme("a.png", *(shape(label=name) for name in NAMES_OF_ONE_CUP)),
            "a.png": "",
        },
        (1, ["1 x classes whose names", *NAMES_OF_ONE_CUP[:3]]),
    ),
    "classes that numbers tell apart": (
        {"a.json": labelme("a.png", shape(label="1-0"), shape(label="10")), "a.png": ""},
        (0, ["! classes whose names"]),
    ),
    "CVAT's ellipses and cuboids": (
        {
            "a.xml": cvat("a.png").replace(
                "<box",
                '<ellipse label="key" cx="20" cy="15" rx="8" ry="4" rotation="90"/>'
                '<cuboid label="key" xtl1="1" ytl1="1" xbl1="1" ybl1="9" xtr1="9" ytr1="1" '
                'xbr1="9" ybr1="9" xtl2="4" ytl2="0" xbl2="4" ybl2="8" xtr2="12" ytr2="0" '
                'xbr2="12" ybr2="8"/>'
                '<polyline label="key" points="1,1;2,2"/><box',
            ),
            "a.png": "",
        },
        (0, ["2 key", "1 x polyline: type of shape that is not read", "a.xml, line 1"]),
    ),
    "LabelMe's shapes of types that are not read": (
        {
            "a.json": labelme(
                "a.png", shape(), shape("linestrip"), shape("point", ((1, 2),)), shape("linestrip")
            ),
            "a.png": "",
        },
        (0, ["1 cup", "2 x linestrip: type", "a.json: shape 1", "1 x point: type"]),
    ),
    "VIA's shapes of types that are not read": (
        {"a.json": via("a.png").replace('"rect"', '"point"'), "b.json": via("b.png")}
        | {"a.png": "", "b.png": ""},
        (0, ["1 cup", "1 x point: type of shape that is not read", "a.png, shape 0"]),
    ),
    "a type of shape with the signs of a terminal": (
        {"a.json": labelme("a.png", shape(), shape("\x1b[31m" + 100 * "x")), "a.png": ""},
        (0, ["1 x \\x1b[31m" + 32 * "x" + ": type of shape that is not read"]),
    ),
    "LabelMe's empty mask with its rectangle": (
        {
            "a.json": labelme(
                "a.png",
                shape("mask", mask=base64.b64encode(encoded(Image.new("1", (11, 6)))).decode()),
                shape("mask", ((5, 5), (20, 20)), mask=None),
            ),
            "a.png": "",
        },
        (0, ["2 x empty mask", "2 cup"]),
    ),
    "VOC's difficult objects": (
        {"a.xml": voc("a.png", BOX, (2, 12, 11, 17), more="<difficult>1</difficult>"), "a.png": ""},
        (0, ["2 x object marked as difficult", "2 cup"]),
    ),
    "YOLO's classes as numbers with a point": (
        {"data.yaml": YAML, "a.png": "", "a.txt": "0.000000 .5 .5 .5 .5\n1.0 .5 .5 .2 .2\n"},
        (0, ["1 cup", "1 key"]),
    ),
    "half a class of YOLO": (
        {"data.yaml": YAML, "a.png": "", "a.txt": "0.5 .5 .5 .5 .5\n"},
        (2, ["a.txt, line 1"]),
    ),
    # --------------------------------------------------------- texts
    "UTF-16 labels": (
        {"data.yaml": YAML, "a.png": "", "a.txt": LINE.encode("utf-16")},
        (2, ["a.txt is text in UTF-16"]),
    ),
    "UTF-16 without a mark": (
        {"data.yaml": YAML, "a.png": "", "a.txt": LINE.encode("utf-16-le")},
        (2, ["a.txt is text in UTF-16"]),
    ),
    "GBK names": (
        {"classes.txt": "杯\n钥匙\n".encode("gbk"), "a.png": "", "a.txt": LINE},
        (2, ["classes.txt", "'杯' in GBK", "UTF-8"]),
    ),
    "GBK XML that says so": (
        {
            "a.xml": ('<?xml version="1.0" encoding="GBK"?>' + voc("猫.png", BOX)).encode("gbk"),
            "猫.png": "",
        },
        (0, ["1 cup"]),
    ),
    "GBK XML that does not": (
        {"a.xml": voc("猫.png", BOX).encode("gbk"), "猫.png": ""},
        (2, ["a.xml", "GBK"]),
    ),
    "a list of names that is called labels.txt": (
        {"labels.txt": "cup\nkey\n", "images/a.png": "", "labels/a.txt": LINE},
        (2, ["labels.txt may be it", "classes.txt"]),
    ),
    "YOLO without names": (
        {"images/a.png": "", "labels/a.txt": LINE},
        (2, ["look like YOLO's labels", "classes.txt"]),
    ),
    "a table": ({"a.csv": "a,b\n", "a.png": ""}, (2, ["1 .csv"])),
    # --------------------------------------------------------- data.yaml
    "a path of train that is not there": (
        {"data.yaml": YAML + "train: imagse\nval: val\n", "val/a.png": "", "images/b.png": ""},
        (2, ["train names imagse", "images, val"]),
    ),
    "a path of val that is not there": (
        {"data.yaml": YAML + "train: train\nval: vall\n", "val/a.png": "", "train/b.png": ""},
        (2, ["val names vall", "train, val"]),
    ),
    **{
        f"{value} in the place of a path": (
            {"data.yaml": YAML + f"train: train\nval: {value}\n", "train/b.png": ""},
            (2, ["value of val", words]),
        )
        for value, words in {"{a: val}": "dict", "[[val]]": "list"}.items()
    },
    "lists of images without a file that names them": (
        {
            "classes.txt": "cup\n",
            **{"train.txt": "images/a.png\n", "val.txt": "\nimages/b.png\n"},
            **{"images/a.png": "", "images/b.png": "", "labels/a.txt": LINE, "labels/b.txt": LINE},
            "images/c.png": "",
        },
        (
            0,
            [
                "(train)",
                "(val)",
                "1 image",
                "! 2 images",
            ],
        ),
    ),
    **{
        f"parts called {train} and {val}": (
            {
                f"{part}/{part}.{ending}": text
                for part in (train, val)
                for ending, text in (("png", ""), ("xml", voc(f"{part}.png", BOX)))
            },
            (0, [f"set/{train}\n", f"set/{val}\n"]),
        )
        for train, val in (("trainset", "valset"), ("TrainImages", "TestImages"), ("trn", "eval"))
    },
    "nothing to train on": (
        {"data.yaml": YAML + "val: val\n", "val/a.png": "", "train/b.png": ""},
        (2, ["names images for val", "train"]),
    ),
    "two parts to evaluate on": (
        {
            f"{part}/a.{ending}": text
            for part in ("val", "test")
            for ending, text in (("png", ""), ("xml", voc("a.png", BOX)))
        },
        (2, ["val and test", "--train"]),
    ),
    "a path of another machine whose end is another folder": (
        {"data.yaml": YAML + "train: /me/set/train/images\nval: val\n", "images/a.png": ""},
        (2, ["train names /me/set/train/images"]),
    ),
    "lists of names in the folders of the labels, as labelImg writes them": (
        {
            **{f"labels/{part}/classes.txt": "cup\n" for part in ("train", "val")},
            **{f"images/{part}/{part}.png": "" for part in ("train", "val")},
            **{f"labels/{part}/{part}.txt": LINE for part in ("train", "val")},
        },
        (0, ["labels/val\n"]),
    ),
    "lists of names that differ": (
        {"x/classes.txt": "cup\n", "y/classes.txt": "key\n", "x/a.png": "", "x/a.txt": LINE},
        (2, ["name one of them"]),
    ),
    "a list of labelImg in another order than data.yaml's": (
        {
            **{"data.yaml": YAML + "train: images\n", "labels/classes.txt": "key\ncup\n"},
            **{"images/a.png": "", "labels/a.txt": LINE},
        },
        (1, ["1 x list of names", "class 0 is 'cup', and 'key' in", "classes.txt"]),
    ),
    "lists with more of the same names": (
        {
            **{"data.yaml": YAML, "classes.txt": "Cup \nkey\nfork\n", "hyp.yaml": "lr: 1\n"},
            **{"a.png": "", "a.txt": LINE},
        },
        (0, ["1 cup", "! list of names"]),
    ),
    "empty label files and missing ones": (
        {"data.yaml": YAML, **dict.fromkeys(["a.png", "b.png"], ""), "a.txt": LINE, "c.png": ""}
        | {"b.txt": ""},
        (0, ["2 x image without an object", "1 x image without a label file", "c.png"]),
    ),
    "YOLO of an image that EXIF turns by 90 degrees": (
        {"data.yaml": YAML, "a.jpg": encoded(image("e"), "jpg", exif=LYING), "a.txt": LINE},
        (1, ["1 x image that its EXIF data turn"]),
    ),
    "one label file of two images": (
        {"data.yaml": YAML, "a.png": "", "a.jpg": "", "a.txt": LINE},
        (1, ["2 cup", "1 x label file of two images", "a.jpg and ", "a.png"]),
    ),
    # --------------------------------------------------------- classes and shapes
    "VIA whose classes are of two attributes": (
        {
            "a.json": via("a.png", "b.png", "c.png", "d.png")
            .replace('{"kind": "cup"}', '{"kind": "", "colour": "red"}', 1)
            .replace('{"kind": "cup"}', "{}", 1),
            **dict.fromkeys(["a.png", "b.png", "c.png", "d.png"], ""),
        },
        (1, ["2 x object whose class is of another", "b.png, shape 0: it has no class"]),
    ),
    "VIA with two attributes": (
        {
            "a.json": via("a.png").replace('{"kind": "cup"}', '{"state": "good", "kind": "cup"}'),
            "a.png": "",
        },
        (0, ["1 good"]),
    ),
    "LabelMe with shapes of one group": (
        {"a.json": labelme("a.png", *JOINED, shape(group_id=2)), "a.png": ""},
        (0, ["2 cup", "1 x shapes of one class and group", "shape 0 and 2 more"]),
    ),
    "LabelMe with shapes of no group": (
        {
            "a.json": labelme(
                "a.png", *(shape(points=((1, 4 * y), (9, 29)), group_id=g) for y, g in NO_GROUPS)
            ),
            "a.png": "",
        },
        (0, ["6 cup", "! of one class and group"]),
    ),
    "YOLO with poses and no kpt_shape": (
        {"data.yaml": YAML, "a.png": "", "a.txt": LINE.strip() + " .26 .31 1 .74 .69 2"},
        (0, ["1 cup", "1 x points of poses"]),
    ),
    "COCO's file of instances and another one": (
        {"instances_train.json": coco("a.png"), "b.json": coco("b.png"), "a.png": "", "b.png": ""},
        (0, ["1 image", "not used beside instances", "b.json"]),
    ),
    # --------------------------------------------------------- copies
    "the same image in two parts": (
        {
            **{f"{part}/{part}.xml": voc(f"{part}.png", BOX) for part in ("train", "val")},
            **{f"{part}/{part}.png": encoded(image("one")) for part in ("train", "val")},
        },
        (1, ["1 image in two parts", "val.png and "]),
    ),
    "copies of Roboflow in two parts": (
        {
            f"{part}/a_png.rf.{part}0000.{ending}": text
            for part in ("train", "valid")
            for ending, text in (("png", ""), ("json", labelme(f"a_png.rf.{part}0000.png")))
        },
        (1, ["1 image in two parts"]),
    ),
    "a part that others are a part of": (
        {
            "data.yaml": YAML + "train: images\nval: images/val\n",
            **{"images/a.png": "", "images/val/b.png": "", "labels/a.txt": LINE},
        },
        (1, ["1 image in two parts"]),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_check_says(case, tmp_path, capsys, caplog):
    caplog.set_level("INFO")
    files, (status, words) = CASES[case]
    found, output = checked(make(tmp_path / "set", files), capsys)
    output += caplog.text
    assert found == status, output
    for word in words:
        assert (word.removeprefix("! ") in output) is not word.startswith("! "), output


# ------------------------------------------------------------------------------ renamed images
@pytest.mark.parametrize(
    ("name", "text"), [("10.json", labelme("old.jpg")), ("10.xml", voc("old.jpg", BOX))]
)
def test_labels_of_an_image_that_has_another_name_now(name, text, tmp_path, capsys):
    status, output = checked(make(tmp_path / "set", {name: text, "10.jpg": ""}), capsys)
    assert status == 0 and "1 x labels that name another image" in output
    assert "old.jpg, and 10.jpg is taken" in output


@pytest.mark.parametrize("named", ["a.png", "old.png"])
@pytest.mark.parametrize(
    ("copy", "is_other"),
    [("a.png", False), ("another", True), ("no image", False), ("half", False), (None, False)],
)
def test_labelme_whose_images_were_exchanged_is_refused(copy, is_other, named, tmp_path, capsys):
    """Its copy of the image tells, whether the image was renamed as well or not."""
    data = b"no image" if copy == "no image" else encoded(image(copy or ""), "jpg")
    data = data[: len(data) // 2] if copy == "half" else data
    copied = {"imageData": base64.b64encode(data).decode()} if copy else {}
    root = make(tmp_path / "set", {"a.json": labelme(named, **copied), "a.png": ""})
    status, output = checked(root, capsys)
    assert ("1 x labels whose imageData" in output) == is_other == (status == 1)
    assert not is_other or "a.json: " in output


def test_voc_that_names_another_image_that_is_there_is_refused(tmp_path, capsys):
    """A name of an image that is not there is of the time before it was renamed."""
    make(tmp_path, {"a.png": "", "b.png": "", "a.xml": voc("b.png", BOX)})
    status, output = checked(tmp_path, capsys)
    assert status == 1 and "a.xml names b.png" in output
    (tmp_path / "b.png").unlink()
    assert checked(tmp_path, capsys)[0] == 0


# ----------------------------------------------------------------------------------------- links
@pytest.mark.posix
def test_a_folder_counts_by_its_own_name_and_not_by_a_link(tmp_path):
    """Else the images of val were trained on as those of a folder without a word."""
    make(
        tmp_path,
        {
            f"{part}/{part}.{ending}": text
            for part in ("val", "scans")
            for ending, text in (("png", ""), ("xml", voc(f"{part}.png", BOX)))
        },
    )
    (tmp_path / "latest").symlink_to("val")
    _, (train, val) = find_parts(tmp_path)
    names = [[i["file_name"] for i in read_json(p.labels)["images"]] for p in (train, val)]
    assert names == [["scans/scans.png"], ["val/val.png"]]


# --------------------------------------------------------------------------------- other matters
def test_a_yaml_of_nested_aliases_is_refused_at_once(tmp_path):
    """Its text would have more letters than any memory."""
    for inner in ("[*{}, *{}]", "{{<<: [*{}, *{}]}}"):
        lines = ["a0: &a0 [x, x]" if "<<" not in inner else "a0: &a0 {x: y}"]
        lines += [f"a{n}: &a{n} " + inner.format(f"a{n - 1}", f"a{n - 1}") for n in range(1, 60)]
        for key in ("names: [*a59]", "names: [x]\ntrain: *a59", "names: {0: x}\npath: *a59"):
            make(tmp_path, {"data.yaml": "\n".join([*lines, key]), "a.png": ""})
            if "path" not in key:
                with pytest.raises(DataError, match=r"data\.yaml"):
                    find_parts(tmp_path)
            else:
                find_parts(tmp_path)


@pytest.mark.parametrize("place", ["", "D:\\me\\"])
def test_copies_of_one_image_are_held_out_together(place, tmp_path):
    """Those of Roboflow, files of the same bytes, and variants by their names."""
    names = [f"p{n}_jpg.rf.{n * m + 100000}.jpg" for n in range(20) for m in (1, 2, 3)]
    same = [f"copy {n} of {m}.jpg" for n in range(3) for m in range(20)]
    forms = (
        "key{}.jpg",
        "key{}.png",
        "key{}_flip.png",
        "aug_2_key{}.jpg",
        "key{}-rot90_blur.jpg",
        "key{} - Copy.jpg",
    )
    variants = [[form.format(n) for form in forms] for n in range(20)]
    names += [name for group in variants for name in group]
    alone = [f"r{n}{end}.jpg" for n in range(20) for end in ("_crop", "_scale 2")]
    names += alone  # of no image that is there
    make(tmp_path, dict.fromkeys(names, ""))
    make(tmp_path, {name: encoded(image(name[-7:]), "jpg") for name in same})
    images = [
        {"id": n, "file_name": place + name, "width": 40, "height": 30}
        for n, name in enumerate(names + same)
    ]
    content = json.loads(coco("x.png")) | {"images": images, "annotations": []}
    make(tmp_path, {"a.json": json.dumps(content)})
    for split in (Split(0.3), Split(0.3, stratify=True)):
        train, val = (
            {image["file_name"].removeprefix(place) for image in read_json(file)["images"]}
            for file in hold_out(
                str(tmp_path / "a.json"), str(tmp_path), split, folder=temporary_folder()
            )
        )
        for start in {name.partition("_jpg")[0] for name in names if "_jpg" in name}:
            of_one = {name for name in names if name.startswith(f"{start}_")}
            assert of_one <= train or of_one <= val
        for group in variants:
            assert set(group) <= train or set(group) <= val
        assert any((f"r{n}_crop.jpg" in train) != (f"r{n}_scale 2.jpg" in train) for n in range(20))
        for end in {name[-7:] for name in same}:
            of_one = {name for name in same if name.endswith(end)}
            assert of_one <= train or of_one <= val
        assert train and val


def test_a_file_that_changes_is_recognised_again(tmp_path):
    make(tmp_path, {"a.json": labelme("a.png")})
    assert recognise(tmp_path)[0] == "LabelMe"
    make(tmp_path, {"a.json": coco("a.png")})
    os.utime(tmp_path / "a.json", (1, 1))
    assert recognise(tmp_path)[0] == "COCO"


def test_coco_s_images_in_several_folders_are_refused_with_both(tmp_path):
    make(tmp_path, {"a.json": coco("a.png"), "depth/a.png": "", "rgb/a.png": ""})
    with pytest.raises(DataError, match=r"depth.*rgb"):
        find_parts(tmp_path)


@pytest.mark.parametrize(
    "name",
    [
        "/home/me/set/images/a.png",
        "D:\\set\\images\\a.png",
        "https://host/bucket/images/a.png?key=1",
        "../../label-studio/media/upload/4/01234567-a.png",
        "/data/local-files/?d=images/a.png",
    ],
)
def test_coco_s_images_by_the_end_of_a_path(name, tmp_path):
    make(tmp_path, {"a.json": coco(name), "images/a.png": ""})
    _, (part,) = find_parts(tmp_path)
    assert part.images == tmp_path / "images"


def test_coco_s_images_in_a_folder_and_below_it(tmp_path):
    content = json.loads(coco("a.png"))
    content["images"].append({**content["images"][0], "id": 2, "file_name": "b.png"})
    make(tmp_path, {"valid/x.json": json.dumps(content), "valid/a.png": "", "valid/more/b.png": ""})
    assert find_parts(tmp_path)[1][0].images == tmp_path / "valid"
