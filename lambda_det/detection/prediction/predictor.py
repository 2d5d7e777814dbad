"""Find instances in images with the detector of a run or with an exported one."""

from __future__ import annotations

import contextlib
import io
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.structures import Instances
from omegaconf import DictConfig
from PIL import Image
from torchvision.ops import nms

from lambda_det.detection.data.predictions import predictions
from lambda_det.detection.data.records import as_input, pixels_of, read_image
from lambda_det.detection.merging import SAME
from lambda_det.detection.prediction import DEFAULT_THRESHOLD
from lambda_det.detection.run_masks import RunMasks
from lambda_det.detection.saved_run import SavedRun, open_run, usable_score
from lambda_det.detection.tiled import WholeImage
from lambda_det.detection.tiles import Tiling
from lambda_det.errors import ConfigError, UserError, listed, naming_arguments, printable
from lambda_det.files import expanded, refuse_existing, refuse_missing, writing_to
from lambda_det.process import keep_memory
from lambda_det.weights.provenance import Origin

logger = logging.getLogger(__name__)

FileName = str | os.PathLike
ImageLike = FileName | Image.Image | np.ndarray
_NOTEBOOK_SIDE = 1000  # the longer side of an image in a notebook, in pixels, at most
# From images as Detectron2's models take them to their "instances"
Detect = Callable[[list[dict[str, Any]]], list[dict[str, Instances]]]
# For the ending of a file the class, in another module, that opens its detector and is called as
# Detect; it also has ``about``, ``channels``, ``resize``, ``batch`` and ``tiling``
OPENERS = {".onnx": "lambda_det.export.exported:ExportedDetector"}
# For the beginning of an address the function, in another module, that fetches a detector from
# there
FETCHERS = {"hf://": "lambda_det.own_data.hub:of_hub"}


@dataclass(frozen=True, repr=False)
class Prediction:
    """The instances of one image, the highest scores first, in pixels of that image.

        found = predictor("photo.jpg")
        found                              # Prediction(7 circle, 2 square; 640x480)
        found.plot()                       # in a notebook an image, as ``found`` itself
        pandas.DataFrame(found.to_dict())

    Attributes:
        instances: Detectron2's, on the CPU. Of an image that was cut into tiles, ``pred_masks``
            are :class:`lambda_det.detection.run_masks.RunMasks`.
        class_names: of all classes of the detector; None if they are not known.
        image: the file, the Pillow image, or the pixels [H, W, 3], BGR. Of several images in one
            call pixels are not kept, because they might fill the memory; None then.
    """

    instances: Instances
    class_names: list[str] | None = None
    image: ImageLike | None = field(default=None, compare=False)

    def __len__(self) -> int:
        return len(self.instances)

    def __repr__(self) -> str:
        height, width = self.instances.image_size
        return f"Prediction({counts_in_words(self.counts)}; {width}x{height})"

    def _repr_png_(self) -> bytes | None:
        """The image of a notebook; None where the pixels are not known."""
        with contextlib.suppress(UserError):
            content = io.BytesIO()
            scale = min(1.0, _NOTEBOOK_SIDE / max(self.instances.image_size))
            self.plot(scale=scale).save(content, "PNG")
            return content.getvalue()
        return None

    @property
    def boxes(self) -> np.ndarray:
        """[N, 4] float32: x0, y0, x1, y1."""
        return self.instances.pred_boxes.tensor.numpy()

    @property
    def scores(self) -> np.ndarray:
        """[N] float32, from 0 to 1."""
        return self.instances.scores.numpy()

    @property
    def classes(self) -> np.ndarray:
        """[N] int64, from 0."""
        return self.instances.pred_classes.numpy()

    @property
    def names(self) -> list[str]:
        """The name of each instance's class, or its number where the names are not known."""
        names = self.class_names
        return [names[index] if names else str(index) for index in self.classes]

    @property
    def counts(self) -> dict[str, int]:
        """The number of instances of each class that was found, in the order of the classes."""
        names = self.names
        return dict(Counter(names[place] for place in np.argsort(self.classes, kind="stable")))

    @property
    def areas(self) -> np.ndarray:
        """[N] float64: the pixels of each mask; of each box for a detector without masks."""
        if not self.instances.has("pred_masks"):
            return self.instances.pred_boxes.area().double().numpy()
        masks = self.instances.pred_masks
        if isinstance(masks, RunMasks):
            areas = [masks.area(number) for number in range(len(masks))]
        else:
            areas = [np.count_nonzero(mask) for mask in self.masks]
        return np.array(areas, np.float64)

    @property
    def masks(self) -> np.ndarray | None:
        """[N, H, W] bool; None for a detector without masks.

        ``instances.pred_masks`` gives them one at a time, which an image of 100 megapixels needs.
        """
        return self.instances.pred_masks.numpy() if self.instances.has("pred_masks") else None

    @property
    def keypoints(self) -> np.ndarray | None:
        """[N, K, 3] float32: x, y, score; None for a detector without keypoints."""
        has = self.instances.has("pred_keypoints")
        return self.instances.pred_keypoints.numpy() if has else None

    def to_dict(self) -> dict[str, list]:
        """The columns of a table with a row for each instance, which ``pandas.DataFrame`` takes.

        They are class (the name), score, x0, y0, x1, y1 and area, as in ``predict --csv``.
        """
        corners = zip(("x0", "y0", "x1", "y1"), self.boxes.T.tolist(), strict=True)
        columns = {"class": self.names, "score": self.scores.tolist()}
        return {**columns, **dict(corners), "area": self.areas.tolist()}

    def plot(
        self,
        image: ImageLike | None = None,
        *,
        scale: float = 1.0,
        with_labels: bool = True,
    ) -> Image.Image:
        """Draw the instances into the image, as ``lambda-det predict`` does.

        Args:
            image: a path, a Pillow image, or an array [H, W, 3] of uint8, BGR; None for the
                predicted image.
            scale: size of the drawing relative to the image.
            with_labels: write classes and scores.

        Returns:
            A Pillow image, RGB; ``numpy.asarray`` gives its pixels.

        Raises:
            ConfigError: the prediction does not have its image, or this one has another size.
            DataError: the file cannot be read.
        """
        # it imports matplotlib, which a prediction does not need
        from lambda_det.detection.drawing import draw_predictions

        image = self.image if image is None else image
        if image is None:
            raise ConfigError(
                "The prediction is one of several and did not keep its pixels: plot(image) or "
                "save(path, image) takes them."
            )
        pixels = image if isinstance(image, np.ndarray) else read_bgr(image)
        height, width = self.instances.image_size
        if pixels.shape != (height, width, 3):
            raise ConfigError(
                f"The image is {pixels.shape}, and the prediction of one of {(height, width, 3)}."
            )
        drawn = draw_predictions(
            pixels, self.instances, self.class_names, scale, with_labels=with_labels
        )
        return Image.fromarray(drawn[:, :, ::-1])

    @naming_arguments()
    def save(
        self,
        path: FileName,
        image: ImageLike | None = None,
        *,
        overwrite: bool = False,
        **options: Any,
    ) -> None:
        """Write the image of :meth:`plot` to a file.

        Args:
            path: of the file; its ending is the format.
            image: to draw on, as in :meth:`plot`.
            overwrite: replace an existing file.
            options: of :meth:`plot`.

        Raises:
            ConfigError: the file exists and ``overwrite`` is False, or cannot be written.
        """
        path = expanded(path)
        refuse_existing(path, overwrite)
        picture = self.plot(image, **options)
        with writing_to(path):
            picture.save(path)


def counts_in_words(counts: Mapping[str, int]) -> str:
    """Counts by class for a line of text, such as "7 circle, 2 square"."""
    return ", ".join(f"{count} {printable(name)}" for name, count in counts.items()) or "nothing"


class Predictor:
    """A trained detector: call it on images.

        predictor = lambda_det.Predictor("output/mine")
        found = predictor("photo.jpg")
        found.boxes, found.scores, found.names, found.masks

    Images may have any size. They are resized as in the detector's evaluation. Those of a detector
    of tiles (INPUT.TILE) are cut before, and what is found in the tiles is joined.

    Attributes:
        origin: the file of the weights, which of the file's weights, and the number of steps.
        class_names: of the predicted classes by index; None if they are not known.
        best_score: with the best F1 at the evaluation of these weights; None if it is unknown.
        score_threshold: the lowest score of the instances that are returned.
        tiling: how images are cut into tiles; None for a detector of whole images.
        on_tiles: called with the number of computed tiles, and that of all tiles of an image.
    """

    best_score: float | None = None
    on_tiles: Callable[[int, int], None] | None = None

    def __init__(
        self,
        source: FileName | CfgNode | DictConfig | SavedRun,
        *,
        checkpoint: str = "best",
        raw: bool = False,
        score_threshold: float | None = None,
        device: str | None = None,
        precision: str | None = None,
        batch_size: int = 1,
        agnostic_nms: bool = False,
    ) -> None:
        """Build or load the detector.

        Args:
            source: the folder of a run, or one of its checkpoints; hf://OWNER/NAME of the Hugging
                Face Hub; a detector that lambda-det export wrote (.onnx); or a configuration that
                names the weights of the whole detector. The run of a LazyConfig must be from people
                you trust, because what it names is called.
            checkpoint: of a folder: "best" at its evaluations, "last", or the number of its step.
            raw: the trained weights, also where a checkpoint has averaged ones.
            score_threshold: lowest score of the instances to return, from 0 to 1; None for
                ``best_score``, as ``lambda-det predict`` takes it, or 0.5 where it is unknown. An
                exported detector leaves out instances below the threshold of its export.
            device: such as "cpu" or "cuda"; None as in the configuration. An exported
                detector is computed on the CPU.
            precision: "float32" or "bfloat16"; None as in the configuration.
            batch_size: images, or tiles, that are computed at once, if they have one size after
                resizing, because padding would change the results. A file of a fixed batch takes
                its own.
            agnostic_nms: of instances of any classes that overlap by more than half (IoU), return
                the one with the highest score. A young detector finds several classes on one
                object.

        Raises:
            ConfigError: a value cannot work, the device is missing, or the model predicts no
                instances.
            WeightsError: there are no weights, they do not fit the model, or nothing says to which
                detector they belong.
        """
        if score_threshold is not None and not 0 <= score_threshold <= 1:
            raise ConfigError(f"The score threshold is {score_threshold}; give one from 0 to 1.")
        if batch_size < 1:
            raise ConfigError(f"The batch size is {batch_size}; give at least 1.")
        self._given_threshold, self._batch_size = score_threshold, batch_size
        self._agnostic_nms = agnostic_nms
        with naming_arguments():
            if isinstance(source, FileName):
                source = local_path(expanded(source))
                if is_exported(source):
                    if raw or precision:
                        raise ConfigError(
                            f"{source} is exported, with its weights and precision; leave raw and "
                            "precision out."
                        )
                    self._open_exported(Path(source), device)
                    return
            if not isinstance(source, SavedRun):
                source = open_run(source, checkpoint, raw=raw)
            self._open(source, device, precision)

    def _open(self, run: SavedRun, device: str | None, precision: str | None) -> None:
        detector = run.components.detector
        if "instances" not in predictions(detector.architecture):
            raise ConfigError(
                f"{detector.keys['architecture']} {detector.architecture} finds no instances, and "
                "only those are predicted; --eval-only of the training's tool evaluates it."
            )
        model = run.detector(device, precision)
        self._file = run.origin.file
        self.origin, self.class_names = run.origin, run.classes.get("thing_classes")
        self.best_score = run.best_score
        self.tiling = run.components.tiling
        for module in model.modules():
            # the attributes of RoI heads and of dense detectors
            if hasattr(module, "test_score_thresh"):
                # it leaves out what is equal, which is the best score itself
                least = float(np.nextafter(np.float32(self.score_threshold), np.float32(0)))
                if self.tiling:  # tiles are joined as in an evaluation, also by weak detections
                    least = min(least, module.test_score_thresh)
                module.test_score_thresh = least
        pixels = run.components.pixels
        self._channels = _order(pixels.format if pixels else "BGR")
        self._augmentations = run.components.make_test_augmentations()
        self._detect: Detect = _by_size(model)
        self._device_type = next(model.parameters()).device.type

    def _open_exported(self, path: Path, device: str | None) -> None:
        keep_memory()
        self._file = path
        detector = resolve_name(OPENERS[path.suffix])(path, device)
        self.origin = Origin(*(detector.about.get(key) for key in ("weights", "step", "averaged")))
        self.class_names = detector.about.get("classes")
        self.best_score = usable_score(detector.about.get("best_score"))
        least = detector.about.get("score_threshold") or 0.0
        if least > self.score_threshold:
            logger.warning(f"{path} leaves out instances whose score is below {least:g}")
        if "min_size_test" not in detector.about:
            logger.warning(
                f"{path} does not say how its evaluation resizes images, which does more to them "
                "than that: here they keep their sizes"
            )
        self._channels, self._augmentations = detector.channels, detector.resize
        self.tiling: Tiling | None = detector.tiling
        self._batch_size = max(self._batch_size, detector.batch)
        self._detect, self._device_type = detector, "cpu"

    def __repr__(self) -> str:
        found = listed(self.class_names or ["classes without names"])
        return f"Predictor({self._file}: {found}; from a score of {self.score_threshold:.3g})"

    @property
    def score_threshold(self) -> float:
        known = (self._given_threshold, self.best_score, DEFAULT_THRESHOLD)
        return next(score for score in known if score is not None)

    def __call__(
        self, images: ImageLike | Iterable[ImageLike], channels: str = "BGR"
    ) -> Prediction | list[Prediction]:
        """Find the instances of one image or of several.

        Args:
            images: a path, a Pillow image, or an array [H, W, 3] of uint8; or several of these, or
                an array [B, H, W, 3].
            channels: of arrays: "BGR" as OpenCV reads images, or "RGB".

        Returns:
            A prediction for one image, and a list for several.

        Raises:
            ConfigError: an array is no image, or ``channels`` is something else.
            DataError: an image cannot be read, or has more than 8 bits a channel.
        """
        _order(channels)
        is_array = isinstance(images, np.ndarray)
        is_one = isinstance(images, FileName) or not isinstance(images, Iterable)
        if is_one or (is_array and images.ndim != 4):
            (found,) = self._predict([images], channels)
            if is_array and channels == "RGB":
                images = images[:, :, ::-1]
            return replace(found, image=images)
        found, rest = [], iter(images)
        while batch := list(islice(rest, self._batch_size)):
            found += self._predict(batch, channels)
        return found

    def _predict(self, images: Sequence[ImageLike], channels: str) -> list[Prediction]:
        # the detector's own precision, whatever the caller's
        with torch.no_grad(), torch.autocast(self._device_type, enabled=False):
            if self.tiling is None:
                found = self._detected([self._read(image, channels) for image in images])
            else:
                found = [self._detected_in_tiles(self._read(image, channels)) for image in images]
        kept = [instances[instances.scores >= self.score_threshold] for instances in found]
        if self._agnostic_nms:
            kept = [_one_class_per_place(instances) for instances in kept]
        return [
            Prediction(found, self.class_names, image if isinstance(image, FileName) else None)
            for found, image in zip(kept, images, strict=True)
        ]

    def _detected(self, pixels: Sequence[np.ndarray]) -> list[Instances]:
        inputs = [as_input(each, self._augmentations) for each in pixels]
        return [output["instances"].to("cpu") for output in self._detect(inputs)]

    def _detected_in_tiles(self, pixels: np.ndarray) -> Instances:
        """The instances of an image [H, W, 3] of any size, a batch of its tiles at a time."""
        height, width = pixels.shape[:2]
        image, tiles = WholeImage(height, width), self.tiling.tiles(height, width)
        for start in range(0, len(tiles), self._batch_size):
            batch = tiles[start : start + self._batch_size]
            found = self._detected([pixels[t.y0 : t.y1, t.x0 : t.x1] for t in batch])
            for tile, instances in zip(batch, found, strict=True):
                image.add(tile, instances)
            if self.on_tiles is not None:
                self.on_tiles(start + len(batch), len(tiles))
        return image.instances()

    def _read(self, image: ImageLike, channels: str) -> np.ndarray:
        """The pixels [H, W, 3] of an image, in the order of the detector."""
        if isinstance(image, FileName | Image.Image):
            image, channels = read_bgr(image), "BGR"
        shape, kind = getattr(image, "shape", ()), getattr(image, "dtype", None)
        if kind != np.uint8 or shape[2:] != (3,) or 0 in shape:
            raise ConfigError(
                f"An image is a {type(image).__name__} {shape} of {kind}; give a path, a Pillow "
                "image, or an array [H, W, 3] of uint8."
            )
        return image if channels == self._channels else image[:, :, ::-1]


def _one_class_per_place(instances: Instances) -> Instances:
    """The instances that no better one of any class covers by more than ``SAME`` (IoU)."""
    kept = torch.zeros(len(instances), dtype=torch.bool)
    kept[nms(instances.pred_boxes.tensor, instances.scores, SAME)] = True
    return instances[kept]


def _by_size(model: Detect) -> Detect:
    """The detector with batches of images of one size only, so nothing is padded."""

    def detect(inputs: list[dict[str, Any]]) -> list[dict[str, Instances]]:
        groups: dict[torch.Size, list[int]] = {}
        for place, entry in enumerate(inputs):
            groups.setdefault(entry["image"].shape, []).append(place)
        outputs: dict[int, dict[str, Instances]] = {}
        for places in groups.values():
            outputs |= zip(places, model([inputs[place] for place in places]), strict=True)
        return [outputs[place] for place in range(len(inputs))]

    return detect


def _order(channels: str) -> str:
    if channels not in ("BGR", "RGB"):
        raise ConfigError(f"The channels of images are {channels!r}; they can be BGR or RGB.")
    return channels


def is_exported(source: FileName) -> bool:
    """Whether a path has the ending of an exported detector."""
    return Path(source).suffix in OPENERS


def local_path(source: FileName) -> FileName:
    """A path on this machine; the file of an address of FETCHERS is fetched."""
    for prefix, fetch in FETCHERS.items():
        if str(source).startswith(prefix):
            return resolve_name(fetch)(source)
    return source


def read_bgr(image: FileName | Image.Image) -> np.ndarray:
    """Read an image as [H, W, 3] uint8, BGR, upright as its EXIF data say.

    Raises:
        DataError: it cannot be read, or has more than 8 bits a channel.
    """
    if isinstance(image, Image.Image):
        return pixels_of(image)
    refuse_missing(file := expanded(image))
    return read_image({"file_name": file})
