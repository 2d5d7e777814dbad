"""The classifier as it is trained: pixels in, loss or scores out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from detectron2.config import CfgNode
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.errors import ConfigError
from lambda_det.modeling.backbones import network_options
from lambda_det.modeling.build import Classifier, create_classifier
from lambda_det.modeling.norm import convert_sync_norms


class PixelClassifier(nn.Module):
    """A classifier on batches of the loader, whose pixels are bytes until they are on the device.

    Args:
        classifier: maps normalised images [B, 3, S, S] to scores [B, classes].
        pixel_mean: of red, green and blue, from 0 to 255.
        pixel_std: likewise.
        label_smoothing: share of the label spread over all classes (Szegedy et al., 2016).
        channels_last: whether the maps of the network lie in memory channels last.
    """

    def __init__(
        self,
        classifier: Classifier,
        pixel_mean: Sequence[float],
        pixel_std: Sequence[float],
        *,
        label_smoothing: float = 0.0,
        channels_last: bool = True,
    ) -> None:
        super().__init__()
        self.layout = torch.channels_last if channels_last else torch.contiguous_format
        self.classifier = classifier.to(memory_format=self.layout)
        self.label_smoothing = label_smoothing
        # Not in the state dict: they are settings, and a checkpoint names them as such
        mean, std = (torch.tensor(values).view(3, 1, 1) for values in (pixel_mean, pixel_std))
        self.register_buffer("pixel_mean", mean, persistent=False)
        self.register_buffer("pixel_std", std, persistent=False)

    def forward(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor] | Tensor:
        """
        Args:
            batch: images uint8 [B, S, S, 3], red first, and in training labels int64 [B].

        Returns:
            In training the mean loss by name, otherwise float32 scores [B, classes].
        """
        scores = self.scores(batch["images"])
        if not self.training:
            return scores
        labels = batch["labels"].to(scores.device, non_blocking=True)
        return {"loss": F.cross_entropy(scores, labels, label_smoothing=self.label_smoothing)}

    def scores(self, images: Tensor) -> Tensor:
        """From uint8 [B, S, S, 3] on any device to float32 [B, classes]."""
        pixels = images.to(self.pixel_mean.device, non_blocking=True).permute(0, 3, 1, 2)
        pixels = ((pixels - self.pixel_mean) / self.pixel_std).contiguous(memory_format=self.layout)
        return self.classifier(pixels).float()


def model_options(cfg: CfgNode) -> dict[str, Any]:
    """The arguments by which the network of ``cfg`` differs from the named network.

    Returns:
        Plain values for ``create_classifier``, as a checkpoint keeps them.

    Raises:
        ConfigError: the images are larger than the position embeddings know.
    """
    largest = cfg.MODEL.LAMBDA_RESNET.GLOBAL_CONTEXT
    for name in ("SIZE", "TEST_SIZE"):
        size = cfg.INPUT[name]
        if 0 < largest < size:
            raise ConfigError(
                f"INPUT.{name} is {size}, above MODEL.LAMBDA_RESNET.GLOBAL_CONTEXT {largest}, the "
                "largest images that the position embeddings know; raise that, or set it to 0."
            )
    return network_options(cfg.MODEL, cfg.MODEL.LAMBDA_RESNET) | {"dropout": cfg.MODEL.DROPOUT}


def build_classifier(
    cfg: CfgNode, num_classes: int, kind: type[PixelClassifier] = PixelClassifier
) -> PixelClassifier:
    """The model of ``cfg`` on its device.

    Args:
        cfg: a recipe.
        num_classes: of the data.
        kind: the class that computes scores and losses.

    Raises:
        ConfigError: the configuration describes no model.
    """
    classifier = create_classifier(cfg.MODEL.NAME, num_classes, **model_options(cfg))
    model = kind(
        convert_sync_norms(classifier, cfg.MODEL.DEVICE),
        cfg.MODEL.PIXEL_MEAN,
        cfg.MODEL.PIXEL_STD,
        label_smoothing=cfg.SOLVER.LABEL_SMOOTHING,
        channels_last=cfg.MODEL.CHANNELS_LAST,
    )
    return model.to(cfg.MODEL.DEVICE)
