"""Run a trained detector on images and videos, and draw what it finds."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import cv2
import numpy as np
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.data.detection_utils import read_image
from detectron2.engine import DefaultPredictor
from detectron2.structures import Instances
from tqdm import tqdm

from lambda_det.detection.data import check_coco, class_names, register_json_datasets
from lambda_det.detection.data.jitter import ResizeShortestEdgeAtLeastOnePixel
from lambda_det.detection.data.predictions import predictions
from lambda_det.detection.data.registration import registered_files
from lambda_det.detection.drawing import VideoDrawer, draw_predictions, side_by_side
from lambda_det.detection.model import build_model
from lambda_det.distributed.launch import check_device
from lambda_det.errors import ConfigError, DataError, UserError, WeightsError, reason
from lambda_det.training.checkpointer import SafeCheckpointer, last_checkpoint

__all__ = [
    "Picture",
    "Predictor",
    "Result",
    "find_weights",
    "plan_dataset",
    "plan_files",
    "predict",
]

logger = logging.getLogger(__name__)

IMAGE_SUFFIXES = frozenset([".bmp", ".jpeg", ".jpg", ".png", ".ppm", ".tif", ".tiff", ".webp"])
VIDEO_SUFFIXES = frozenset([".avi", ".m4v", ".mkv", ".mov", ".mp4", ".mpeg", ".mpg", ".webm"])
# Images of other formats are drawn to PNG files
_WRITTEN_SUFFIXES = frozenset([".jpeg", ".jpg", ".png"])


@dataclass
class Picture:
    """An image or video file to predict on, and the file to draw it to.

    Attributes:
        source: the image or video.
        target: the file to write.
        annotations: the ground truth, to draw beside the predictions; None without.
        true_class_names: names of the classes of ``annotations``.
    """

    source: Path
    target: Path
    annotations: list[dict] | None = None
    true_class_names: list[str] | None = None

    @property
    def is_video(self) -> bool:
        return self.source.suffix.lower() in VIDEO_SUFFIXES


def plan_files(inputs: Iterable[str | Path], output: str | Path, overwrite: bool) -> list[Picture]:
    """List the images and videos to predict on and their targets. Writes nothing.

    Args:
        inputs: images, videos, and folders, which are searched recursively for images.
        output: folder of the targets. Images of a folder keep their relative paths.
        overwrite: replace existing targets.

    Raises:
        DataError: an input is missing, or a folder holds no image.
        ConfigError: two targets coincide, or a file would be overwritten.
    """
    output = Path(output)
    pictures = []
    for path in map(Path, inputs):
        if path.is_dir():
            found = list(_images_in(path, output))
            if not found:
                raise DataError(
                    f"The folder {path} holds no image ({' '.join(sorted(IMAGE_SUFFIXES))}); give "
                    "another one."
                )
            pictures += [Picture(file, _target(output, file.relative_to(path))) for file in found]
        elif path.exists():
            pictures.append(Picture(path, _target(output, Path(path.name))))
        else:
            hint = "correct the path"
            if "." in path.name and path.name.isupper():
                hint = "KEY VALUE pairs must follow another option, such as --output DIR"
            raise DataError(f"There is no file or folder {path}; {hint}.")
    _check_targets(pictures, overwrite)
    return pictures


def plan_dataset(
    name: str, cfg: CfgNode, output: str | Path, overwrite: bool, limit: int | None = None
) -> list[Picture]:
    """List the images of a registered data set, their ground truth and their targets.

    Args:
        name: of the data set; "train" and "test" mean the first of ``cfg.DATASETS``.
        cfg: may name files in COCO's format, such as ``DATASETS.TEST_JSON``.
        output: folder of the targets.
        overwrite: replace existing targets.
        limit: number of images to use, from the start; None for all.

    Raises:
        DataError: the data set is missing or not in COCO's format.
        ConfigError: there is no such data set, or a file would be overwritten.
    """
    if name in ("train", "test"):
        cfg = cfg.clone()
        cfg.defrost()
        register_json_datasets(cfg)
        names = cfg.DATASETS[name.upper()]
        if not names:
            raise ConfigError(f"DATASETS.{name.upper()} is empty; give the name of a data set.")
        name = names[0]
    json_file, images = registered_files(name)
    check_coco(json_file, images, files="none")
    records = DatasetCatalog.get(name)[:limit]
    if not records:
        raise DataError(f"The data set {name} holds no image.")
    true_names = MetadataCatalog.get(name).get("thing_classes")
    pictures = [
        Picture(
            Path(record["file_name"]),
            _target(Path(output), Path(os.path.relpath(record["file_name"], images))),
            record.get("annotations", []),
            true_names,
        )
        for record in records
    ]
    _check_targets(pictures, overwrite)
    return pictures


def _images_in(folder: Path, output: Path) -> Iterator[Path]:
    output = output.resolve()
    for path in sorted(folder.rglob("*")):
        # The output folder may lie inside the input folder and hold pictures of an earlier run
        if path.suffix.lower() in IMAGE_SUFFIXES and output not in path.resolve().parents:
            yield path


def _target(output: Path, relative: Path) -> Path:
    suffix = relative.suffix.lower()
    if suffix in VIDEO_SUFFIXES:
        return output / relative.with_suffix(".mp4")
    if suffix in _WRITTEN_SUFFIXES:
        return output / relative
    return output / relative.with_name(relative.name + ".png")


def _check_targets(pictures: Sequence[Picture], overwrite: bool) -> None:
    sources: dict[Path, Path] = {}
    inputs = {picture.source.resolve() for picture in pictures}
    for picture in pictures:
        other = sources.setdefault(picture.target, picture.source)
        if other != picture.source:
            raise ConfigError(
                f"{other} and {picture.source} would both be drawn to {picture.target}; use two "
                "runs with different output folders."
            )
        if picture.target.resolve() in inputs:
            raise ConfigError(
                f"{picture.target} is an input and would be overwritten; give another output "
                "folder."
            )
    existing = [target for target in sources if target.exists()]
    if existing and not overwrite:
        raise ConfigError(
            f"{existing[0]} exists already, as do {len(existing)} of the pictures in all; add "
            "--overwrite to replace them, or give another output folder."
        )


class Predictor(DefaultPredictor):
    """Detectron2's predictor for single images, with weights that are read safely and must fit.

    Images may have any size. They are resized to ``INPUT.MIN_SIZE_TEST`` and converted to
    ``INPUT.FORMAT``.

    Attributes:
        class_names: names of the predicted classes by index; None if they are not known.
    """

    def __init__(self, cfg: CfgNode, weights: str, score_threshold: float = 0.5) -> None:
        """Build the model and load its weights.

        Args:
            cfg: the configuration that the weights were trained with.
            weights: a checkpoint of the whole model.
            score_threshold: lowest score of the instances to return, from 0 to 1.

        Raises:
            ConfigError: the device is missing, the threshold is out of range, or the model finds no
                instances.
            WeightsError: the weights are missing or do not fit the model.
        """
        if not 0 <= score_threshold <= 1:
            raise ConfigError(f"The score threshold is {score_threshold}; give one from 0 to 1.")
        if "instances" not in predictions(cfg.MODEL.META_ARCHITECTURE):
            raise ConfigError(
                f"MODEL.META_ARCHITECTURE {cfg.MODEL.META_ARCHITECTURE} finds no instances, and "
                "only those are drawn; tools/train_net.py --eval-only evaluates it."
            )
        if not os.path.isfile(weights):
            raise WeightsError(f"There is no weights file {weights}; correct the path.")
        check_device(cfg.MODEL.DEVICE, 1)
        self.cfg = cfg.clone()
        self.cfg.defrost()
        self.class_names = _known_class_names(self.cfg)
        for head in (self.cfg.MODEL.ROI_HEADS, self.cfg.MODEL.RETINANET):
            head.SCORE_THRESH_TEST = score_threshold
        # DefaultPredictor.__init__ would unpickle the weights, and only warn if they do not fit
        self.model = build_model(self.cfg).eval()
        SafeCheckpointer(self.model).load(weights)
        sizes = self.cfg.INPUT
        self.aug = ResizeShortestEdgeAtLeastOnePixel([sizes.MIN_SIZE_TEST] * 2, sizes.MAX_SIZE_TEST)
        self.input_format = sizes.FORMAT

    def __call__(self, image: np.ndarray) -> Instances:
        """Find the instances of one image.

        Args:
            image: [H, W, 3] uint8, BGR.

        Returns:
            On the CPU, in the size of the image: ``pred_boxes``, ``pred_classes``, ``scores``, and
            with MODEL.MASK_ON ``pred_masks`` [N, H, W].
        """
        return super().__call__(image)["instances"].to("cpu")


def find_weights(cfg: CfgNode, config_file: str, weights: str | None) -> str:
    """Choose ``weights`` if given, else the last checkpoint of the run, else MODEL.WEIGHTS.

    Args:
        cfg: in the config.yaml of a run, MODEL.WEIGHTS is what the training started from.
        config_file: its folder is the folder of the run.
        weights: given by the user.

    Raises:
        WeightsError: none of the three is set.
    """
    found = weights or last_checkpoint(os.path.dirname(config_file)) or cfg.MODEL.WEIGHTS
    if not found:
        raise WeightsError(
            f"There are no weights: the folder of {config_file} has no checkpoint of a run; add "
            "--weights FILE."
        )
    return found


def _known_class_names(cfg: CfgNode) -> list[str] | None:
    """The names of all classes of the model; None, with a warning, if they are not known."""
    retinanet = cfg.MODEL.META_ARCHITECTURE == "RetinaNet"
    section = cfg.MODEL.RETINANET if retinanet else cfg.MODEL.ROI_HEADS
    count = section.NUM_CLASSES
    try:
        # A copy, because registering data sets NUM_CLASSES from the annotations
        named = cfg.clone()
        register_json_datasets(named)
        names = class_names(named)
    except UserError as error:
        logger.warning("Classes are drawn as numbers, because their names are unknown: %s", error)
        return None
    if names is not None and len(names) != count:
        logger.warning(
            "Classes are drawn as numbers: the model has %d classes, the data set %d names.",
            count,
            len(names),
        )
        return None
    return names


@dataclass
class Result:
    """The outcome of :func:`predict`."""

    written: list[Path] = field(default_factory=list)
    unreadable: list[Path] = field(default_factory=list)
    instances: int = 0


def predict(predictor: Predictor, pictures: Sequence[Picture]) -> Result:
    """Predict on each file, draw the result, and show the progress.

    A file that cannot be read is skipped with a warning.

    Raises:
        DataError: none of the files can be read.
        ConfigError: a picture cannot be written.
    """
    result = Result()
    with tqdm(pictures, unit="file", disable=len(pictures) == 1) as progress:
        for picture in progress:
            draw = _draw_video if picture.is_video else _draw_image
            try:
                result.instances += draw(predictor, picture)
                result.written.append(picture.target)
            except DataError as error:
                result.unreadable.append(picture.source)
                progress.clear()
                logger.warning("%s It is skipped.", error)
    if not result.written:
        raise DataError(
            f"None of the {len(pictures)} files can be read; the first is {pictures[0].source}, "
            "see the warnings above."
        )
    return result


def _draw_image(predictor: Predictor, picture: Picture) -> int:
    try:
        image = np.ascontiguousarray(read_image(str(picture.source), format="BGR"))
    except Exception as error:  # PIL raises errors of many types for a damaged file
        raise DataError(f"The image {picture.source} cannot be read ({reason(error)}).") from error
    instances = predictor(image)
    if picture.annotations is None:
        drawn = draw_predictions(image, instances, predictor.class_names)
    else:
        drawn = side_by_side(
            image,
            instances,
            picture.annotations,
            predictor.class_names,
            picture.true_class_names,
        )
    _write(picture.target, lambda path: cv2.imwrite(str(path), drawn))
    return len(instances)


def _draw_video(predictor: Predictor, picture: Picture) -> int:
    """Draw all frames in the size and rate of the video. The sound is dropped."""
    capture = cv2.VideoCapture(str(picture.source))
    try:
        first = capture.read()[1]
        if first is None:
            raise DataError(f"The video {picture.source} cannot be read: it has no first frame.")
        announced = int(capture.get(cv2.CAP_PROP_FRAME_COUNT))
        rate = capture.get(cv2.CAP_PROP_FPS)
        if not 0 < rate < 1000:
            logger.warning("%s records no frame rate; 25 is used.", picture.source)
            rate = 25.0
        counts = [0, 0]
        height, width = first.shape[:2]

        def write(path: Path) -> bool:
            writer = cv2.VideoWriter(
                str(path), cv2.VideoWriter_fourcc(*"mp4v"), rate, (width, height)
            )
            if not writer.isOpened():
                return False
            draw = VideoDrawer(predictor.class_names)
            try:
                frames = tqdm(
                    _frames(first, capture),
                    desc=picture.source.name,
                    unit="frame",
                    total=announced if announced > 0 else None,
                )
                for frame in frames:
                    instances = predictor(frame)
                    writer.write(draw(frame, instances))
                    counts[0] += 1
                    counts[1] += len(instances)
            finally:
                writer.release()
            return True

        _write(picture.target, write)
    finally:
        capture.release()
    if counts[0] < announced:
        logger.warning(
            "%s ends after %d of %d frames.",
            picture.source,
            counts[0],
            announced,
        )
    return counts[1]


def _frames(first: np.ndarray, capture: cv2.VideoCapture) -> Iterator[np.ndarray]:
    frame: np.ndarray | None = first
    while frame is not None:
        yield frame
        frame = capture.read()[1]


def _write(target: Path, write: Callable[[Path], bool]) -> None:
    """Write to a temporary name, then rename, so that ``target`` is always complete."""
    unfinished = target.with_name(f"unfinished-{target.name}")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        written = write(unfinished)
        if written:
            os.replace(unfinished, target)
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error}.") from error
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()
    if not written:
        raise ConfigError(f"{target} cannot be written; check the output folder and its disk.")
