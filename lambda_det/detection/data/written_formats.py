"""The table of the formats of labels that are written, which the help of commands shows."""

from __future__ import annotations

from typing import NamedTuple


class WrittenFormat(NamedTuple):
    """A row of the table.

    Attributes:
        title: its name in sentences, under which ``FORMATS`` of ``own_data/labels/table.py`` has
            the reader.
        ending: of the file of an image; "" for a format with one file.
        classes_file: the name of a file with the names of the classes; "" where the files of the
            images have them.
    """

    title: str
    ending: str = ""
    classes_file: str = ""


WRITTEN = {
    "coco": WrittenFormat("COCO"),
    "yolo": WrittenFormat("YOLO", ".txt", "data.yaml"),
    "labelme": WrittenFormat("LabelMe", ".json"),
}
