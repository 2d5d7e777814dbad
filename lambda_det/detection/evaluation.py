"""Evaluators, chosen by the model's predictions and the data set; COCO's for incomplete
annotations. And what evaluations cost beside a training.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from operator import itemgetter
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.data import DatasetCatalog, MetadataCatalog
from detectron2.evaluation import (
    COCOEvaluator,
    DatasetEvaluators,
    SemSegEvaluator,
    coco_evaluation,
)
from detectron2.structures import Instances
from pycocotools.coco import COCO
from torch.backends import cudnn

from lambda_det.detection.data.coco import coco_api
from lambda_det.detection.data.coco_format import COCO_DETECTIONS
from lambda_det.detection.data.ground_truth import file_report, ground_truth
from lambda_det.detection.data.identity import write_identity
from lambda_det.detection.data.predictions import Detector, evaluated
from lambda_det.detection.data.records import check_labels, read_pixels
from lambda_det.detection.data.registration import has_masks, is_coco, load_records
from lambda_det.detection.matches import ap_interval, matches_of
from lambda_det.detection.panoptic_quality import PanopticQualityEvaluator
from lambda_det.detection.registry import EVALUATORS
from lambda_det.detection.results import METRICS
from lambda_det.detection.run_masks import RunMasks
from lambda_det.detection.tiled import WholeImages
from lambda_det.detection.tiles import Tiling
from lambda_det.distributed.signals import StopRequest, interruptible
from lambda_det.errors import ConfigError, DataError, printable, refused

logger = logging.getLogger(__name__)


@contextmanager
def images_of_any_size() -> Iterator[None]:
    """Keep cuDNN from trying its algorithms again for each size of an evaluation's images."""
    before, cudnn.benchmark = cudnn.benchmark, False
    try:
        yield
    finally:
        cudnn.benchmark = before


# The evaluator is Detectron2's: its own C++ where that is built, else pycocotools. On 5,000 images
# with 36,000 objects and 100 detections each, one core takes for boxes and for masks 50 s and 51 s
# with pycocotools, 12 s and 17 s with that C++, 7 s and 12 s with faster-coco-eval 1.8; memory 2.2,
# 2.6 and 1.4 GB for boxes. All stats are equal. Users who evaluate on COCO can build Detectron2;
# for the others one more required package of a single maintainer would save a minute and a half.
class TolerantCOCOEvaluator(COCOEvaluator):
    """COCOEvaluator on the ground truth that :func:`lambda_det.detection.data.read_coco` decided.

    Detectron2's own evaluator reads the annotation file again, or writes the records of a data set
    without one to a file and reads that. Here the records of the loader are the truth: an object
    without a mask counts as its box, and objects that are left out of training do not count.
    """

    def __init__(
        self,
        dataset_name: str,
        tasks: Sequence[str] | None = None,
        output_dir: str | None = None,
        *,
        kpt_oks_sigmas: Sequence[float] = (),
    ) -> None:
        """
        Args:
            dataset_name: a registered data set.
            tasks: some of "bbox", "segm" and "keypoints"; None: as the predictions have them.
            output_dir: for the files of results.
            kpt_oks_sigmas: of the keypoints; COCO's if it is empty.

        Raises:
            DataError: the annotation file cannot be read.
        """
        # This sets what Detectron2's constructor sets, except the file that it reads.
        self._logger = logging.getLogger(COCOEvaluator.__module__)
        self._distributed = True
        self._output_dir = output_dir
        self._use_fast_impl = coco_evaluation.COCOeval_opt is not coco_evaluation.COCOeval
        self._tasks = tasks
        self._cpu_device = torch.device("cpu")
        self._metadata = MetadataCatalog.get(dataset_name)
        self._coco_api = ground_truth_of(dataset_name)
        self._max_dets_per_image = [1, 10, counted_detections(self._coco_api)]
        self._do_evaluation = True
        self._kpt_oks_sigmas = kpt_oks_sigmas

    @property
    def counted_detections(self) -> int:
        return self._max_dets_per_image[-1]

    def process(self, inputs, outputs):
        """As Detectron2's method, also for masks that are run lengths already."""
        for image, output in zip(inputs, outputs, strict=True):
            fields = dict(output["instances"].get_fields()) if "instances" in output else {}
            masks = fields.pop("pred_masks", None)
            if not isinstance(masks, RunMasks):
                super().process([image], [output])
                continue
            bare = Instances(output["instances"].image_size, **fields)
            super().process([image], [{"instances": bare}])
            for number, result in enumerate(self._predictions[-1]["instances"]):
                result["segmentation"] = masks.coco(number)

    def _eval_predictions(self, predictions, img_ids=None):
        """As Detectron2's method, whose file of results does not name the data."""
        if self.counted_detections != COCO_DETECTIONS:
            self._logger.info(
                f"AP counts {self.counted_detections} detections an image, in place of COCO's "
                f"{COCO_DETECTIONS}: one of the images has that many objects."
            )
        if self._output_dir:
            file = self._metadata.get("json_file") or ""
            write_identity(self._output_dir, self._metadata.name, file, self._coco_api)
        evaluate = partial(super()._eval_predictions, predictions, img_ids)
        # It takes minutes on a large data set, while the other processes wait for this one. So a
        # signal ends it, and where they meet all leave, without results.
        # Its tables are also logged, so log.txt has them.
        with contextlib.suppress(StopRequest), contextlib.redirect_stdout(io.StringIO()):
            interruptible(evaluate)

    def _derive_coco_results(self, coco_eval, iou_type, class_names=None):
        """As Detectron2's method, but without detections AP is 0 and not NaN."""
        # The AP of each class has the name of its category, whatever the order of the run's
        # classes. AP_low and AP_high are the ends of the interval in which AP lies by chance of the
        # images. What METRICS makes of the matches is added.
        if coco_eval is None:
            results = super()._derive_coco_results(None, iou_type, class_names)
            return results | dict.fromkeys(("AP", "AP50", "AP75"), 0.0)
        places = self._metadata.get("thing_dataset_id_to_contiguous_id")
        if class_names is not None and places:
            class_names = [class_names[places[i]] for i in coco_eval.params.catIds]
        results = super()._derive_coco_results(coco_eval, iou_type, class_names)
        classes = matches_of(coco_eval)
        if interval := ap_interval(coco_eval, classes):
            results["AP_low"], results["AP_high"] = interval
        for metric in METRICS:
            if metric.of_classes and (value := metric.of_classes(classes)) is not None:
                results[metric.ending.removeprefix("/")] = value
        return results


def counted_detections(ground_truth: COCO) -> int:
    """The number of detections of an image and a class in AP: COCO's 100, or the most objects.

    With 100 detections a perfect detector has an AP below 100 on images of more objects.
    """
    objects = Counter(
        annotation["image_id"]
        for annotation in ground_truth.anns.values()
        if not annotation.get("iscrowd")
    )
    return max([COCO_DETECTIONS, *objects.values()])


def ground_truth_of(dataset_name: str) -> COCO:
    """The ground truth of a registered data set for :class:`TolerantCOCOEvaluator`.

    Raises:
        DataError: the annotation file cannot be read.
    """
    metadata = MetadataCatalog.get(dataset_name)
    keypoints = metadata.get("keypoint_names")
    if is_coco(dataset_name):
        number = None if keypoints is None else len(keypoints)
        truth = ground_truth(metadata.json_file, metadata.image_root, number)
        if metadata.get("thing_dataset_id_to_contiguous_id") is None:
            # it is set when a data set is loaded, and predictions are counted by it
            metadata.thing_dataset_id_to_contiguous_id = truth.report.places
        return coco_api(truth.records, truth.report.categories, keypoints)
    records = load_records(dataset_name)
    names = metadata.thing_classes
    places = metadata.get("thing_dataset_id_to_contiguous_id") or {i: i for i in range(len(names))}
    by_place = sorted(places.items(), key=itemgetter(1))
    return coco_api(records, {number: names[place] for number, place in by_place}, keypoints)


def check_evaluators(cfg: CfgNode) -> None:
    """Refuse, in one sentence, a configuration with which an evaluation would fail.

    Raises:
        ConfigError: a data set is of a kind that has no evaluator here, the package of its
            evaluator is not installed, it needs masks and the model has none, or the model cannot
            be evaluated as TEST.AUG asks for.
    """
    for name in cfg.DATASETS.TEST:
        kind = MetadataCatalog.get(name).get("evaluator_type")
        if kind not in EVALUATORS:
            raise ConfigError(
                f"{name} in DATASETS.TEST is of the evaluator_type {kind!r}, for which there is no "
                f"evaluator; there are {', '.join(filter(None, EVALUATORS))}."
            )
        install = EVALUATORS[kind].install
        if install and importlib.util.find_spec(install.split()[-1]) is None:
            raise ConfigError(
                f"{name} in DATASETS.TEST, of the evaluator_type {kind}, needs a package that is "
                f"not installed: {install}."
            )
        finds_masks = cfg.MODEL.MASK_ON and cfg.MODEL.META_ARCHITECTURE != "RetinaNet"
        if kind == "cityscapes_instance" and not finds_masks:
            raise ConfigError(
                f"{name} in DATASETS.TEST, of the evaluator_type {kind}, has only an AP of masks, "
                f"and {cfg.MODEL.META_ARCHITECTURE} with MODEL.MASK_ON {cfg.MODEL.MASK_ON} finds "
                "only boxes; evaluate on other data."
            )
    needed = {"META_ARCHITECTURE": "GeneralizedRCNN", "KEYPOINT_ON": False, "LOAD_PROPOSALS": False}
    unfit = [f"MODEL.{key} {cfg.MODEL[key]}" for key in needed if cfg.MODEL[key] != needed[key]]
    if cfg.TEST.AUG.ENABLED and unfit:
        raise ConfigError(
            "TEST.AUG.ENABLED True: Detectron2's augmentation in a test is for a GeneralizedRCNN "
            f"without keypoints, and not for {' and '.join(unfit)}; set TEST.AUG.ENABLED False."
        )


def fix_lvis() -> None:
    """Fix the package lvis, if it was imported.

    Its newest release is of 2020 and uses ``np.float``, which NumPy 1.24 removed: its evaluation
    would fail after the whole inference.
    """
    module = sys.modules.get("lvis.eval")
    if module is not None and not hasattr(module.np, "float"):
        module.np = SimpleNamespace(**vars(np), float=float)


def build_evaluator(
    cfg: CfgNode, dataset_name: str, folder: str = "inference"
) -> DatasetEvaluators:
    """The evaluators for the model's predictions and the data set's ground truth.

    By the data set's evaluator_type: AP of boxes, masks and keypoints as COCO has it, mean IoU of
    semantic masks and panoptic quality, or the measures of LVIS, Pascal VOC and Cityscapes.

    Args:
        cfg: of the detector.
        dataset_name: a registered data set.
        folder: for the files of results, below OUTPUT_DIR.

    Raises:
        ConfigError: the data set has no ground truth of anything that the model predicts.
    """
    folder = os.path.join(cfg.OUTPUT_DIR, folder)
    if len(cfg.DATASETS.TEST) > 1:
        folder = os.path.join(folder, dataset_name)
    measured = evaluated(Detector.from_config(cfg), dataset_name)
    # Named rather than taken from the predictions: a model that finds nothing still has a mask AP
    tasks = {"bbox": True, "segm": cfg.MODEL.MASK_ON, "keypoints": cfg.MODEL.KEYPOINT_ON}
    tasks = tuple(task for task, is_on in tasks.items() if is_on)
    kind = MetadataCatalog.get(dataset_name).get("evaluator_type")
    tiling, sigmas = Tiling.from_config(cfg), cfg.TEST.KEYPOINT_OKS_SIGMAS
    if make := EVALUATORS.get(kind, EVALUATORS[None]).make:
        evaluators = [make(dataset_name, tasks, folder)]
    else:
        if "segm" in tasks and "instances" in measured and not has_masks(dataset_name):
            tasks = tuple(task for task in tasks if task != "segm")
            logger.warning(f"No object of {dataset_name} has a mask, so only boxes get an AP.")
        makers = {
            "instances": partial(TolerantCOCOEvaluator, tasks=tasks, kpt_oks_sigmas=sigmas),
            "semantic": _MaskEvaluator,
            "panoptic": lambda name, output_dir: PanopticQualityEvaluator(name),
        }
        evaluators = [makers[name](dataset_name, output_dir=folder) for name in measured]
    kept = cfg.TEST.DETECTIONS_PER_IMAGE
    counted = max(getattr(one, "counted_detections", 0) for one in evaluators)
    if tiling is None and kept < counted:  # a tile has fewer objects than its image
        logger.warning(
            f"One image of {dataset_name} has up to {counted} objects, and the detector keeps "
            f"{kept} detections: raise TEST.DETECTIONS_PER_IMAGE."
        )
    made = DatasetEvaluators(evaluators)
    return WholeImages(made) if tiling else made


class _MaskEvaluator(SemSegEvaluator):
    """Detectron2's, which names no file where a mask is not of the size of its image."""

    def __init__(self, dataset_name: str, output_dir: str) -> None:
        data = MetadataCatalog.get(dataset_name)
        classes = len(data.stuff_classes)
        read = partial(_read_labels, classes=classes, ignored=data.get("ignore_label"))
        super().__init__(dataset_name, output_dir=output_dir, sem_seg_loading_fn=read)

    def process(self, inputs: list[dict[str, Any]], outputs: list[dict[str, Any]]) -> None:
        for image, output in zip(inputs, outputs, strict=True):
            mask = self.input_file_to_gt_file[image["file_name"]]
            what = f"The semantic mask {printable(mask)} is not of the size of its image"
            with refused(DataError, what, "make it again", ValueError):
                super().process([image], [output])


def _read_labels(path: str, dtype: type, classes: int, ignored: int) -> np.ndarray:
    """A semantic mask [H, W], turned as its EXIF data say, which training does too."""
    # Detectron2's own reader fails with numpy 2, and turns a TIFF twice
    what = f"The semantic mask {printable(path)} cannot be read"
    # Pillow may raise anything for a broken file
    with refused(DataError, what, "make it again", Exception):
        labels = read_pixels(path).astype(dtype)
    check_labels(path, labels, classes, ignored)
    return labels


# ----------------------------------------------------------------------------------------- the cost
# In images of a step, forwards and backwards at the sizes of training, for schedules and forecasts.
# Measured with the light recipe on two cores: 17 photographs with tomatoes (boxes) 0.63, and 108
# facades of 1024x1024 with ten polygons each, whose masks are pasted and compared, 2.8
BOXES, MASKS, LOSSES = 0.7, 3.0, 0.7


def cost_of_image(*, has_masks: bool, has_losses: bool, sets_of_weights: int) -> float:
    """The cost of an image of the test set.

    Args:
        has_masks: whether the detector finds masks.
        has_losses: whether the losses of the test set are also computed, once.
        sets_of_weights: number of evaluated sets of weights: 1 for the trained or the averaged
            ones, 2 for both.
    """
    return sets_of_weights * (MASKS if has_masks else BOXES) + (LOSSES if has_losses else 0.0)


def number_of_images(names: Iterable[str], tiling: Tiling | None = None) -> int:
    """The number of images of registered data sets, which are not opened.

    Args:
        names: of the data sets.
        tiling: how images are cut; then tiles are counted.
    """
    count = 0
    for name in names:
        if is_coco(name):
            metadata = MetadataCatalog.get(name)
            images = file_report(metadata.json_file, metadata.image_root).files
        else:
            images = DatasetCatalog.get(name)
        if tiling is None:
            count += len(images)
        else:
            count += sum(len(tiling.tiles(one["height"], one["width"])) for one in images)
    return count
