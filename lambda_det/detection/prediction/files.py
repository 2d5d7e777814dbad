"""Run a trained detector on files of images and videos, and draw its predictions."""

from __future__ import annotations

import contextlib
import glob
import logging
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import cv2

from lambda_det.detection.data.image_folder import walk
from lambda_det.detection.drawing import draw_predictions
from lambda_det.detection.prediction.annotations import Annotations
from lambda_det.detection.prediction.predictor import (
    Prediction,
    Predictor,
    counts_in_words,
    read_bgr,
)
from lambda_det.detection.prediction.tables import Tables
from lambda_det.errors import (
    ConfigError,
    DataError,
    Stage,
    duration,
    listed,
    printable,
    refused,
    stage,
)
from lambda_det.files import SUFFIXES, refuse_existing, refuse_missing, writing_to

logger = logging.getLogger(__name__)

VIDEO_SUFFIXES = (".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm")
# of labels, which lie beside images and are passed over in silence
_LABEL_SUFFIXES = (".csv", ".json", ".txt", ".xml", ".yaml", ".yml")
# images of other formats are drawn to PNG files
_WRITTEN_SUFFIXES = (".jpeg", ".jpg", ".png")


@dataclass
class Input:
    """An image or video file to predict on, and the file to draw it to.

    Attributes:
        source: the image or video.
        target: the file to write.
        name: of the source, relative to the given folder.
    """

    source: Path
    target: Path
    name: str

    @property
    def is_video(self) -> bool:
        return self.source.suffix.lower() in VIDEO_SUFFIXES


def plan_files(inputs: Iterable[str | Path], output: str | Path, overwrite: bool) -> list[Input]:
    """List the images and videos to predict on and their targets. Writes nothing.

    Args:
        inputs: images, videos, folders, which are searched recursively for images, and patterns
            such as ``day?/*.jpg``.
        output: folder of the targets. Images of a folder keep their relative paths.
        overwrite: replace existing targets.

    Returns:
        Each file once, also where several inputs name it.

    Raises:
        DataError: an input is missing, or a folder holds no image.
        ConfigError: two targets coincide, or a file would be overwritten.
    """
    output = Path(output)
    images: dict[str, Input] = {}
    for given in map(str, inputs):
        folder, files = _files_of(given, output)
        for file in files:
            name = file.relative_to(folder)
            # Links are not followed: files of two names may share their content on purpose
            place = os.path.abspath(file)
            images.setdefault(place, Input(file, _target(output, name), name.as_posix()))
    planned = [*images.values()]
    _check_targets(planned, overwrite)
    return planned


def _files_of(given: str, output: Path) -> tuple[Path, list[Path]]:
    """The folder from which the names of an input's files start, and the files."""
    path, is_folder = Path(given), Path(given).is_dir()
    if path.is_file():
        return path.parent, [path]
    folder = path if is_folder else Path(f"{re.split('[*?[]', given)[0]}x").parent
    paths = walk(path) if is_folder else map(Path, glob.glob(given, recursive=True))
    files = [path for path in sorted(paths) if path.is_file()]
    # The output folder may lie inside the input folder and hold drawings of an earlier run
    made = output.resolve()
    if folder.resolve() in made.parents:
        files = [file for file in files if made not in file.resolve().parents]
    if is_folder:
        others = {path.suffix.lower() or path.name for path in files}.difference(
            SUFFIXES, _LABEL_SUFFIXES
        )
        files = [path for path in files if path.suffix.lower() in SUFFIXES]
        if others:
            logger.warning(
                f"{path}: files of {listed(sorted(others), 5)} are not read as images; write "
                "images among them as JPEG or PNG."
            )
    if not files:
        ending = ""
        if not is_folder and (given.isupper() or "=" in given):  # it is a configuration key
            ending = "; KEY VALUE pairs follow another option, such as --output DIR"
        else:
            refuse_missing(given)
        raise DataError(f"There is no image or video at {given}{ending}.")
    return folder, files


def _target(output: Path, relative: Path) -> Path:
    suffix = relative.suffix.lower()
    if suffix in VIDEO_SUFFIXES:
        return output / relative.with_suffix(".mp4")
    if suffix in _WRITTEN_SUFFIXES:
        return output / relative
    return output / relative.with_name(relative.name + ".png")


def _check_targets(images: Sequence[Input], overwrite: bool) -> None:
    """Refuse targets that coincide, exist, or are an input."""
    sources: dict[Path, Path] = {}
    inputs = {image.source.resolve() for image in images}
    for image in images:
        other = sources.setdefault(image.target, image.source)
        if other != image.source:
            raise ConfigError(
                f"{other} and {image.source} would both be drawn to {image.target}; use two "
                "runs with different output folders."
            )
        if image.target.resolve() in inputs:
            raise ConfigError(
                f"{image.target} is an input and would be overwritten; give another output folder."
            )
        refuse_existing(image.target, overwrite)


@dataclass
class Outcome:
    """The outcome of :func:`predict`."""

    written: list[Path] = field(default_factory=list)
    unreadable: list[Path] = field(default_factory=list)
    instances: int = 0
    seen: Counter[str] = field(default_factory=Counter)  # "image" and "frame"
    empty: int = 0  # of these without an instance
    empty_masks: int = 0


def predict(
    predictor: Predictor,
    images: Sequence[Input],
    collectors: Sequence[Annotations | Tables] = (),
    *,
    with_labels: bool = True,
) -> Outcome:
    """Predict on each file, draw the result, print its counts by class, and show the progress.

    The progress is a line on standard error, some every ten seconds. A file that cannot be read is
    skipped with a warning. A drawn video has no sound.

    Args:
        predictor: the detector.
        images: of :func:`plan_files`.
        collectors: get the predictions on images, and on the frames of videos, which are named as
            ``film.mp4/000001.png`` and so on.
        with_labels: write classes and scores into the images.

    Raises:
        DataError: none of the files can be read.
        ConfigError: an image cannot be written.
    """
    result = Outcome()

    def show_tiles(done: int, tiles: int) -> None:  # an image of many takes minutes
        going.left = f"tile {done} of {tiles} of {printable(image.name)}"

    def add(name: str, prediction: Prediction, source: Path | None = None) -> None:
        counts.update(prediction.counts)
        result.instances += len(prediction)
        result.seen["frame" if image.is_video else "image"] += 1
        result.empty += not len(prediction)
        result.empty_masks += prediction.areas.tolist().count(0)  # no box is empty
        for collector in collectors:
            collector.add(name, prediction, source)

    predictor.on_tiles = show_tiles
    start = time.perf_counter()
    with stage("predicting", partial(print, file=sys.stderr)) as going:
        for done, image in enumerate(images):
            counts = Counter[str]()
            going.left = f"file {done + 1} of {len(images)}"
            if done:
                rest = (len(images) - done) * (time.perf_counter() - start) / done
                going.left += f", about {duration(rest)} left"
            try:
                if image.is_video:
                    where = f" in {_draw_video(predictor, image, add, with_labels, going)} frames"
                else:
                    prediction = predictor(read_bgr(image.source))
                    drawn = prediction.plot(with_labels=with_labels)
                    with _written(image.target) as temporary:
                        # files of the size and in the time of OpenCV, which does not say why one
                        # cannot be written
                        drawn.save(temporary, quality=95, compress_level=1)
                    add(image.name, prediction, image.source)
                    where = ""
                result.written.append(image.target)
                print(f"{printable(image.name)}: {counts_in_words(counts)}{where}")
            except DataError as error:
                result.unreadable.append(image.source)
                logger.warning(f"{error} It is skipped.")
    predictor.on_tiles = None
    if not result.written:
        raise DataError(
            f"None of the {len(images)} files can be read; the first is {images[0].source}, "
            "see the warnings above."
        )
    return result


def _draw_video(
    predictor: Predictor,
    image: Input,
    add: Callable[[str, Prediction], None],
    with_labels: bool,
    going: Stage,
) -> int:
    """Draw all frames in the video's size and rate, add each, and return their number."""
    what = f"The video {printable(image.source)} has a name that is no Unicode"
    # OpenCV ends the process at such a name
    with refused(DataError, what, "rename the file or its folder", UnicodeEncodeError):
        f"{image.source}{image.target}".encode()
    capture = cv2.VideoCapture(str(image.source))
    frame = capture.read()[1]
    if frame is None:
        raise DataError(f"The video {image.source} cannot be read: it has no first frame.")
    announced = capture.get(cv2.CAP_PROP_FRAME_COUNT)
    rate = capture.get(cv2.CAP_PROP_FPS)
    if not 0 < rate < 1000:
        logger.warning(f"{image.source} records no frame rate; 25 is used.")
        rate = 25.0
    drawn = 0
    with _written(image.target) as temporary:
        codec = cv2.VideoWriter_fourcc(*"mp4v")
        # The codec halves the sides of colours, and would leave out the last pixel of an odd side
        odd = [side % 2 for side in frame.shape[:2]]
        size = frame.shape[1] + odd[1], frame.shape[0] + odd[0]
        writer = cv2.VideoWriter(str(temporary), codec, rate, size)
        try:
            while frame is not None:
                found = predictor(frame)
                drawn += 1
                going.left = f"frame {drawn} of {printable(image.name)}"
                add(f"{image.name}/{drawn:06d}.png", found)
                shown = draw_predictions(
                    frame, found.instances, predictor.class_names, with_labels=with_labels
                )
                shown = cv2.copyMakeBorder(shown, 0, odd[0], 0, odd[1], cv2.BORDER_REPLICATE)
                # None before OpenCV 5
                if not writer.isOpened() or writer.write(shown) is False:
                    break
                frame = capture.read()[1]
        finally:
            writer.release()
        # The end of a file is written on release, which reports no full disk
        if cv2.VideoCapture(str(temporary)).get(cv2.CAP_PROP_FRAME_COUNT) < drawn:
            raise OSError("frames are missing in it; look whether the disk has free space")
    if drawn < announced:
        logger.warning(f"{image.source} ends after {drawn} of {announced:.0f} frames.")
    return drawn


@contextlib.contextmanager
def _written(target: Path) -> Iterator[Path]:
    """Write to a temporary name, which is renamed at the end, so ``target`` is complete."""
    temporary = target.with_name(f"unfinished-{target.name}")
    try:
        with writing_to(target):
            yield temporary
            os.replace(temporary, target)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()
