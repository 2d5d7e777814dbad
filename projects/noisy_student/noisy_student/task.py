"""The training of a student: labelled images, and a teacher's labels for others.

Xie et al. (2020), Section 2; their code adds both losses up as :meth:`Student.forward` does.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from detectron2.config import CfgNode
from detectron2.utils import comm
from torch import Tensor
from torch.nn import functional as F

from lambda_det.classification.config import get_classification_config, load_recipe
from lambda_det.classification.data.loader import LabelledTrainLoader
from lambda_det.classification.model import PixelClassifier, build_classifier
from lambda_det.classification.task import ClassificationTask
from lambda_det.config import FREE
from lambda_det.errors import ConfigError
from lambda_det.training.config_file import ConfigFile
from noisy_student.pseudo_labels import PseudoLabelSource

_SEED = 2_000_003  # added to the run's seed, so both kinds of images have different orders


def get_student_config() -> CfgNode:
    """The defaults of ImageNet training, and the keys of a student."""
    cfg = get_classification_config()
    # A file that projects/noisy_student/pseudo_label.py wrote, and the folder of its images
    cfg.DATA.PSEUDO_LABELS = ""
    cfg.DATA.PSEUDO_IMAGES = ""
    # The number of these images for each labelled image of a batch, in addition to
    # SOLVER.IMS_PER_BATCH. Epochs count only the labelled images, and the learning rate follows
    # them.
    cfg.DATA.PSEUDO_RATIO = 1.0
    # The temperature of the teacher's probabilities, which are the labels; 0: only its most
    # probable class
    cfg.DATA.PSEUDO_TEMPERATURE = 1.0
    return cfg


class Student(PixelClassifier):
    """A classifier that also learns from a teacher's labels."""

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor] | Tensor:
        """
        Args:
            batch: as of a :class:`PixelClassifier`, with B labelled images. In training
                "pseudo_images" uint8 [P, S, S, 3] pass through the network with them, and
                "pseudo_labels" are float32 [P, classes], or int64 [P] where they are hard.

        Returns:
            In training the losses by name: the mean over the labelled images, and the sum over the
            others, divided by B. So their sum is the first mean plus P/B times the second, as in
            Noisy Student. Labels of probabilities are not smoothed.
        """
        if not self.training:
            return super().forward(batch)
        device, labelled = self.pixel_mean.device, len(batch["labels"])
        both = torch.cat([batch[name].to(device) for name in ("images", "pseudo_images")])
        scores = self.scores(both)
        labels, pseudo = (batch[name].to(device) for name in ("labels", "pseudo_labels"))
        smoothing = 0.0 if pseudo.is_floating_point() else self.label_smoothing
        others = F.cross_entropy(
            scores[labelled:], pseudo, label_smoothing=smoothing, reduction="sum"
        )
        own = F.cross_entropy(scores[:labelled], labels, label_smoothing=self.label_smoothing)
        return {"loss": own, "pseudo_loss": others / labelled}


class StudentLoader:
    """Batches of labelled and pseudo-labelled images; both kinds can begin at any place.

    Each kind has its own loader processes, order and epochs.

    Args:
        labelled: of the labelled images.
        pseudo: of the others.
        source: the others.
        temperature: of their labels; 0 for hard ones.
    """

    def __init__(
        self,
        labelled: LabelledTrainLoader,
        pseudo: LabelledTrainLoader,
        source: PseudoLabelSource,
        temperature: float,
    ) -> None:
        self._labelled, self._pseudo = labelled, pseudo
        self._source, self._temperature = source, temperature

    def begin(self, seed: int, batches: int) -> None:
        self._labelled.begin(seed, batches)
        self._pseudo.begin(seed + _SEED, batches)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for labelled, pseudo in zip(self._labelled, self._pseudo, strict=True):
            labels = pseudo["labels"]
            if self._temperature:
                soft = [self._source.soft_label(i, self._temperature) for i in pseudo["indices"]]
                labels = torch.from_numpy(np.stack(soft))
            yield {
                **labelled,
                "pseudo_images": pseudo["images"],
                "pseudo_labels": labels,
                "pseudo_indices": pseudo["indices"],
            }

    def state_dict(self) -> dict[str, Any]:
        return {
            **self._labelled.state_dict(),
            "pseudo_images": self._pseudo.state_dict()["images"],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._labelled.load_state_dict(state)
        self._pseudo.load_state_dict({"images": state.get("pseudo_images", 0)})


class StudentTask(ClassificationTask):
    """A student that a recipe describes.

    Attributes:
        pseudo: the images with a teacher's labels; None where nothing is trained.
    """

    on_resume = MappingProxyType(
        {
            **ClassificationTask.on_resume,
            "DATA.PSEUDO_IMAGES": FREE,
            "DATA.PSEUDO_LABELS": FREE,
        }
    )
    pseudo: PseudoLabelSource | None = None

    @classmethod
    def read(cls, args: argparse.Namespace, file: ConfigFile | None = None) -> StudentTask:
        return cls(load_recipe(args, get_student_config(), file))

    def prepare(self, *, train: bool) -> StudentTask:
        data = self.cfg.DATA
        if train:
            _check(data)
        super().prepare(train=train)
        if train:
            images = self.plan.forward * data.PSEUDO_RATIO
            if images != int(images):
                raise ConfigError(
                    f"DATA.PSEUDO_RATIO {data.PSEUDO_RATIO} x {self.plan.forward} labelled "
                    "images of a forward pass (SOLVER.IMS_PER_BATCH over "
                    f"{comm.get_world_size()} process(es) x SOLVER.ACCUMULATE_GRADIENTS) is not a "
                    "whole number; change one of them."
                )
            self.pseudo = PseudoLabelSource(
                data.PSEUDO_LABELS, data.PSEUDO_IMAGES, self.sources.train.classes
            )
        return self

    def build_model(self) -> Student:
        return build_classifier(self.cfg, len(self.sources.train.classes), Student)

    def build_train_loader(self, *, for_statistics: bool = False) -> StudentLoader:
        data = self.cfg.DATA
        pseudo = LabelledTrainLoader(
            self.cfg,
            self.pseudo,
            batch_size=int(self.plan.forward * data.PSEUDO_RATIO),
            key="DATA.PSEUDO_LABELS",
        )
        return StudentLoader(
            super().build_train_loader(), pseudo, self.pseudo, data.PSEUDO_TEMPERATURE
        )

    def image_names(self, batch: Mapping[str, Tensor]) -> list[str]:
        others = [self.pseudo.name(index) for index in batch["pseudo_indices"].tolist()]
        return super().image_names(batch) + others


def _check(data: CfgNode) -> None:
    for key in ("PSEUDO_LABELS", "PSEUDO_IMAGES"):
        if not data[key]:
            raise ConfigError(
                f"DATA.{key} is empty: name the file of projects/noisy_student/pseudo_label.py in "
                "DATA.PSEUDO_LABELS, and the folder of its images in DATA.PSEUDO_IMAGES."
            )
    if not 0 < data.PSEUDO_RATIO < float("inf"):
        raise ConfigError(f"DATA.PSEUDO_RATIO is {data.PSEUDO_RATIO}; give a number above 0.")
    if not 0 <= data.PSEUDO_TEMPERATURE < float("inf"):
        raise ConfigError(
            f"DATA.PSEUDO_TEMPERATURE is {data.PSEUDO_TEMPERATURE}; give a number above 0, or 0 "
            "for hard labels."
        )
