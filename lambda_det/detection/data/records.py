"""Read the image and the semantic mask of a dataset dict, and find faults of their files."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch
from detectron2.data.detection_utils import convert_PIL_to_numpy
from detectron2.data.transforms import AugInput, AugmentationList
from detectron2.utils.file_io import PathManager
from PIL import Image

from lambda_det.errors import DataError, printable, refused

# The turns for the values of EXIF's orientation, as in Detectron2
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_LYING = (5, 6, 7, 8)  # values that exchange height and width


def orientation(image: Image.Image) -> int:
    """EXIF's orientation of an image, 1 for upright.

    It is 1 for a TIFF, which Pillow turns by itself while it loads the pixels.
    """
    return 1 if image.format == "TIFF" else _tag(image)


def _tag(image: Image.Image) -> int:
    try:
        if image.format == "PNG" and not _png_may_turn(image):
            return 1
        value = image.getexif().get(274, 1)
    except Exception:  # as in Detectron2: the pixels may be sound nevertheless
        return 1
    return value if value in _TURNS else 1


def _png_may_turn(image: Image.Image) -> bool:
    """Whether a PNG has EXIF data or XMP. Pillow decodes the pixels to see those behind them."""
    file = image.fp
    if file is None:  # it is decoded
        return True
    place = file.tell()
    try:
        file.seek(8)  # behind the signature
        while len(head := file.read(8)) == 8 and head[4:] != b"IEND":
            start = file.tell()
            if head[4:] == b"eXIf" or (
                head[4:] in _PNG_TEXTS and file.read(_LONGEST).startswith(_ABOUT_TURNS)
            ):
                return True
            file.seek(start + int.from_bytes(head[:4], "big") + 4)
        return False
    finally:
        file.seek(place)


_PNG_TEXTS = (b"tEXt", b"zTXt", b"iTXt")
_ABOUT_TURNS = (b"Raw profile type exif", b"XML:com.adobe.xmp")  # keywords of texts
_LONGEST = max(map(len, _ABOUT_TURNS))


def upright(image: Image.Image) -> Image.Image:
    """Turn an image as its EXIF data say; this is the only place that turns images.

    Which colours of a palette are transparent is forgotten, as readers do, because Pillow would
    warn of it without the image's name.
    """
    image.info.pop("transparency", None)
    turn = _TURNS.get(orientation(image))
    return image if turn is None else image.transpose(turn)


def small_grey(file: BinaryIO | str | Path) -> np.ndarray:
    """An image in levels of grey [64, 64]."""
    with Image.open(file) as image:
        image.draft("L", (64, 64))
        return np.asarray(upright(image).convert("L").resize((64, 64)), float)


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Width and height of :func:`upright`. The pixels are read only for a turned TIFF."""
    if _tag(image) not in _LYING:
        return image.size
    if image.format == "TIFF":
        image.load()  # without that, only newer versions of Pillow give the turned size
        return image.size
    return image.size[::-1]


def read_pixels(path: str | os.PathLike, image_format: str | None = None) -> np.ndarray:
    """The pixels of an image, :func:`upright`, as Detectron2's reader has them.

    Detectron2 itself turns a TIFF a second time.

    Args:
        path: of the file.
        image_format: as in ``INPUT.FORMAT``; None as in the file.

    Returns:
        [H, W, C], or [H, W] where the format of the file has one channel.

    Raises:
        Exception: of any kind, as Pillow raises it for a broken file.
    """
    with PathManager.open(os.fspath(path), "rb") as file:
        return convert_PIL_to_numpy(upright(Image.open(file)), image_format)


def read_image(record: dict[str, Any], image_format: str = "BGR") -> np.ndarray:
    """The image of a dataset dict, upright as its EXIF data say.

    Args:
        record: with "file_name" and, to check the size, "width" and "height".
        image_format: as in ``INPUT.FORMAT``.

    Returns:
        uint8 [H, W, 3], contiguous; [H, W, 1] for the format L.

    Raises:
        DataError: the file cannot be read, has more than 8 bits, or is of another size.
    """
    path = record["file_name"]
    fault = head_fault(path, "any" if image_format == "L" else "pixels") or size_fault(record)
    if fault:
        raise DataError(fault)
    what = f"The image {printable(path)} cannot be read"
    advice = "fetch it again, write it as JPEG or PNG, or leave it out"
    with refused(DataError, what, advice, Exception):  # of any kind, for a broken file
        return np.ascontiguousarray(read_pixels(path, image_format))


def pixels_of(image: Image.Image) -> np.ndarray:
    """The pixels of a Pillow image in BGR, as :func:`read_image` has those of a file.

    Raises:
        DataError: it cannot be read, or has more than 8 bits.
    """
    what = "The Pillow image"
    if fault := _depth_fault(what, image.mode):
        raise DataError(fault)
    about = dict(image.info)  # the caller's, of which upright takes the transparency
    with refused(DataError, f"{what} cannot be read", "open it again", Exception):
        pixels = np.ascontiguousarray(convert_PIL_to_numpy(upright(image), "BGR"))
    image.info.update(about)
    return pixels


def as_input(image: np.ndarray, augmentations: AugmentationList) -> dict[str, Any]:
    """An image [H, W, 3] as Detectron2's models take it, resized."""
    resized = AugInput(image)
    augmentations(resized)
    tensor = torch.as_tensor(resized.image.astype("float32").transpose(2, 0, 1))
    return {"image": tensor, "height": image.shape[0], "width": image.shape[1]}


def size_fault(record: dict[str, Any]) -> str | None:
    """One sentence on an image whose head has another size than its record says; or None.

    It is also None where the head cannot be read, which the reader of the pixels will report.
    """
    try:
        with PathManager.open(record["file_name"], "rb") as file, Image.open(file) as image:
            size, turn = upright_size(image), orientation(image)
    except Exception:  # Pillow may raise anything for a broken file
        return None
    said = (record.get("width", size[0]), record.get("height", size[1]))
    if said == size:
        return None
    why = "its boxes would be elsewhere, correct one of them"
    if turn in _LYING and said == size[::-1]:
        why = (
            f"its EXIF orientation {turn} turns it, which the tool that labelled it did not do; "
            "label it as it is shown, or save it without that entry"
        )
    return (
        f"The image {printable(record['file_name'])} is {size[0]}x{size[1]} (width x height, "
        f"upright), but the annotations say {said[0]}x{said[1]}; {why}."
    )


def image_fault(record: dict[str, Any], image_format: str = "BGR") -> str | None:
    """One sentence on what is wrong with an image, as :func:`read_image` has it, or None."""
    try:
        read_image(record, image_format)
    except DataError as error:
        return str(error)
    return None


def decoding_fault(record: dict[str, Any]) -> str | None:
    """As :func:`image_fault`, for an image without a :func:`size_fault` that is only looked at.

    A JPEG is read completely, but decoded at an eighth of its size, in an eighth of the time. Of a
    PNG the checksums are compared, which cover every byte of its pixels.
    """
    path = record["file_name"]
    try:
        with PathManager.open(path, "rb") as file, Image.open(file) as image:
            if image.format in ("JPEG", "MPO"):
                image.draft(image.mode, (1, 1))
                image.load()
                return None
            if image.format == "PNG":
                image.verify()
                return head_fault(path)
    except Exception:  # image_fault puts Pillow's error into words
        pass
    return image_fault(record)


def mask_fault(record: dict[str, Any]) -> str | None:
    """The fault of the semantic mask of a dataset dict with a sound image, or None."""
    path = record.get("sem_seg_file_name")
    if path is None:
        return None
    fault = image_fault({**record, "file_name": path}, "L")
    return fault and fault.replace("The image", "The semantic mask", 1)


def head_fault(path: str | os.PathLike | None, content: str = "pixels") -> str | None:
    """The fault of a file by its kind and its head, or None; also None where the reader will fail.

    Pillow cuts values of more than 8 bits at 255, and Detectron2 converts a mask to 8-bit grey,
    which changes the labels of palette and 16-bit masks.

    Args:
        path: None for none.
        content: "pixels"; "labels" of a semantic mask; or "any", which checks only the kind of the
            file.
    """
    try:
        # Opening a pipe would never return
        if not stat.S_ISREG(os.stat(path).st_mode):
            return (
                f"The image {printable(path)} is not a file but a folder, pipe or device; put the "
                "image there or leave it out; of a folder name the images, as FOLDER/*.jpg."
            )
        with open(path, "rb") as file:
            is_jpeg = file.read(3) == b"\xff\xd8\xff"  # of 8 bits; Pillow would take longer
        if content == "any" or (content == "pixels" and is_jpeg):
            return None
        with Image.open(path) as image:
            mode = image.mode
    except Exception:  # Pillow's errors for a broken file; or there is no file
        return None
    if content == "labels" and mode != "L":
        return (
            f"The semantic mask {printable(path)} is of mode {mode}, and its labels would be read "
            "as others; save the labels as 8-bit grey (mode L)."
        )
    return _depth_fault(f"The image {printable(path)}", mode)


def _depth_fault(what: str, mode: str) -> str | None:
    if not mode.startswith(("I", "F")):
        return None
    return (
        f"{what} has more than 8 bits a pixel and channel (mode {mode}), and would become white or "
        "black; convert it to 8 bits."
    )


def check_labels(path: str, labels: np.ndarray, classes: int, ignored: int) -> None:
    """Refuse labels of a semantic mask with which loss and mIoU would fail.

    Args:
        path: the file of the mask.
        labels: integers of any shape.
        classes: of the model; their labels start at 0.
        ignored: the label of pixels without a class.

    Raises:
        DataError: names the first of them.
    """
    foreign = labels[(labels >= classes) & (labels != ignored)]
    if foreign.size:
        raise DataError(
            f"The semantic mask {printable(path)} holds the label {foreign[0]}, but there are "
            f"{classes} classes, from 0, and {ignored} for pixels without a class; correct the "
            "mask or MODEL.SEM_SEG_HEAD.NUM_CLASSES."
        )
