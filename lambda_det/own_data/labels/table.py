"""The table of label formats. It imports nothing of what reads them, for the help of commands."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from lambda_det.detection.data.report import Report
    from lambda_det.own_data.labels.images import NamedImages
    from lambda_det.own_data.labels.objects import LabelledImage

    Reader = Callable[[Path, NamedImages, Report], Iterator[LabelledImage]]

COCO = "COCO"
LISTS = ("classes.txt", ".names")  # ends of the names of YOLO's lists of classes, in small letters


class LabelFormat(NamedTuple):
    """A row of the table of formats.

    Attributes:
        endings: of the names of its files, or whole names.
        signs: words at the top of the file: ``<root>`` of XML, ``"key"`` of JSON, ``key:`` of YAML.
            One of them is enough. ``"*.key"`` is a key of an entry. Where a row has no signs, the
            name of the file is enough.
        reader: the module of this folder and its function that reads the images with their
            objects; "" for COCO's own.
        images: how many images a file describes: "all" of a data set, "some" or "one". A file
            of "one" has the name of its image with another ending, as ``a.json`` or ``a.jpg.json``
            has of ``a.jpg``, so its name does not tell a part of the data, as train.json does.
        boxes: how labels write boxes, of ``BOX_FORMS`` of ``detection/data/box_form.py``. Readers
            give corners in pixels whatever it is; this decides what wrong labels look like.
    """

    endings: tuple[str, ...]
    signs: tuple[str, ...]
    reader: str
    images: Literal["all", "some", "one"]
    boxes: str

    @property
    def read(self) -> Reader | None:
        """The function that ``reader`` names, which is imported when it is used."""
        return resolve_name(f"lambda_det.own_data.labels.{self.reader}") if self.reader else None


_CORNERS, _SIDES = "corners in pixels", "sides in pixels"
_SHARES = "centre and size in shares of 1"

# the first format that has files counts
FORMATS = {
    "YOLO": LabelFormat((".yaml", ".yml"), ("names:",), "yolo:read_yolo", "all", _SHARES),
    COCO: LabelFormat((".json",), ('"images"', '"annotations"'), "", "all", _SIDES),
    "CVAT": LabelFormat((".xml",), ("<annotations>",), "cvat:read_cvat", "some", _CORNERS),
    "Pascal VOC": LabelFormat((".xml",), ("<annotation>",), "voc:read_voc", "one", _CORNERS),
    "LabelMe": LabelFormat((".json",), ('"shapes"',), "labelme:read_labelme", "one", _CORNERS),
    "YOLO with a list of names": LabelFormat(LISTS, (), "yolo:read_yolo", "all", _SHARES),
    "VIA": LabelFormat(
        (".json",),
        ('"_via_settings"', '"_via_img_metadata"', '"*.regions"'),
        "via:read_via",
        "some",
        _SIDES,
    ),
}
