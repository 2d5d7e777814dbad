"""What is exported: a backbone or a detector as a function of tensors, with its original."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from detectron2.modeling import Backbone
from detectron2.modeling.meta_arch import GeneralizedRCNN
from detectron2.structures import ImageList, Instances
from torch import Tensor, nn

from lambda_det.detection.model import choose_in_order
from lambda_det.detection.registry import why_not_exported
from lambda_det.errors import ConfigError
from lambda_det.export.detections import DENSE
from lambda_det.export.portable import portable_copy
from lambda_det.modeling.fold import fold_norms

if TYPE_CHECKING:
    from lambda_det.export.proof import ValidationImages


@dataclass(frozen=True)
class Network:
    """A network to export.

    A backbone takes images [B, 3, H, W] that are normalised already. A detector takes ``images``
    [B, H, W, 3], uint8, RGB, each in the upper left corner, and ``sizes`` [B, 2], int32, their
    heights and widths. H and W are multiples of ``stride``.

    Attributes:
        module: maps the inputs to a dict of tensors, in operators that a graph can hold.
        original: what was exported, to compare with: a backbone, or a model of Detectron2.
        detector: whether it is a detector.
        about: what a user of the file has to know of the images and the weights.
        stride: the sides of its images are multiples of it.
        batch: number of images that the file takes at once; 0 for any number.
        fixed: height and width of its images; None for any.
        validation: images of its run that the file of a detector is compared on; None for none.
        why_none: of those; "" where the user wants none.
    """

    module: nn.Module
    original: nn.Module
    detector: bool
    about: Mapping[str, Any] = field(default_factory=dict)
    stride: int = 1
    batch: int = 0
    fixed: tuple[int, int] | None = None
    validation: ValidationImages | None = None
    why_none: str = "Nothing says which run it is of"


def backbone_network(backbone: Backbone, about: Mapping[str, Any] | None = None) -> Network:
    """A backbone: images [B, 3, H, W], normalised, to features by name.

    Raises:
        ConfigError: a part of it cannot be exported.
    """
    check_exportable(backbone)
    return Network(
        portable_copy(fold_norms(backbone)),
        backbone.eval(),
        detector=False,
        about=about or {},
        stride=max(backbone.size_divisibility, 1),
    )


def detector_network(
    model: nn.Module,
    about: Mapping[str, Any] | None = None,
    *,
    batch: int = 1,
    fixed: tuple[int, int] | None = None,
) -> Network:
    """A detector, see :class:`DetectorGraph`.

    Args:
        model: of Detectron2.
        about: its ``input_format`` says whether the model takes RGB or BGR (the default).
        batch: number of images; 0 for any.
        fixed: height and width of the images; None for any.

    Raises:
        ConfigError: it is no detector of boxes, or a part of it cannot be exported.
    """
    check_exportable(model)
    about = {**(about or {}), "score_threshold": _limit(model, "test_score_thresh")}
    choose_in_order(model)  # as the graph does
    copied, rgb = portable_copy(fold_norms(model)), about.get("input_format") == "RGB"
    graph, stride = DetectorGraph(copied, rgb), max(model.backbone.size_divisibility, 1)
    if fixed and any(side % stride for side in fixed):
        raise ConfigError(
            f"The network takes sides that are multiples of {stride}, and not "
            f"{fixed[0]}x{fixed[1]}."
        )
    return Network(
        graph, model.eval(), detector=True, about=about, stride=stride, batch=batch, fixed=fixed
    )


def check_exportable(model: nn.Module) -> None:
    """Refuse layers that a graph would compute rightly for some sizes, and wrongly for others.

    Raises:
        ConfigError: names the layer and the reason.
    """
    for name, module in model.named_modules():
        if sides := getattr(module, "map_size", None):
            raise ConfigError(
                f"{name} has global position embeddings, which hold for maps of up to "
                f"{'x'.join(map(str, sides))} positions, and an exported graph would not notice a "
                "larger one; export a network with a local scope."
            )


def _check_detector(model: nn.Module) -> None:
    """Raise ConfigError where a model does not predict boxes as DetectorGraph does."""
    # Only GeneralizedRCNN itself: a derived class, such as PanopticFPN, does more
    plain = (
        isinstance(model, GeneralizedRCNN) and type(model).inference is GeneralizedRCNN.inference
    )
    why = why_not_exported(model)
    if not (plain or isinstance(model, DENSE)):
        why = f"{type(model).__name__} does not predict boxes as GeneralizedRCNN or RetinaNet does"
    elif plain and model.proposal_generator is None:
        why = "The detector takes its proposals from a file"
    elif plain and getattr(model.roi_heads, "keypoint_on", False):
        why = "Detectron2's keypoint heads take the number of boxes on an image out of the graph"
    elif model.backbone.padding_constraints.get("square_size", 0) > 0:
        why = "The backbone wants square images, which an exported detector does not make"
    elif _most(model) < 1:
        why = (
            f"TEST.DETECTIONS_PER_IMAGE is {_most(model)}, and the file has a fixed number for each"
            " image"
        )
    if why:
        raise ConfigError(f"{why}; export only the backbone instead.")


def _limit(model: nn.Module, name: str) -> Any:
    """An attribute of the last choice of boxes; None where a detector does not have it."""
    return next((getattr(m, name) for m in model.modules() if hasattr(m, name)), None)


def _most(model: nn.Module) -> int:
    """The largest number of detections on an image."""
    is_rcnn = isinstance(model, GeneralizedRCNN)
    return _limit(model, "test_topk_per_image" if is_rcnn else "max_detections_per_image")


def fields(instances: Instances) -> dict[str, Tensor]:
    """The tensors of ``instances`` by name without "pred_"; boxes as [N, 4]."""
    return {
        name.removeprefix("pred_"): getattr(value, "tensor", value)
        for name, value in sorted(instances.get_fields().items())
    }


class DetectorGraph(nn.Module):
    """A detector of Detectron2 on images of one canvas; each may fill only a part of it.

    Images are resized before, and masks are pasted after it. :func:`exportable_detections` makes
    the shapes of all tensors independent of what the images show.

    Args:
        model: in evaluation mode.
        rgb: whether the model takes RGB.

    Raises:
        ConfigError: the way in which it predicts is not known.
    """

    def __init__(self, model: nn.Module, rgb: bool = False) -> None:
        super().__init__()
        _check_detector(model)
        self.model, self.rgb, self.most = model, rgb, _most(model)

    def forward(self, images: Tensor, sizes: Tensor) -> dict[str, Tensor]:
        """Map images [B, H, W, 3] and their heights and widths [B, 2] to detections.

        Returns:
            ``boxes`` [B, N, 4] in pixels of the images, ``classes`` and ``scores`` [B, N], and, if
            the detector has them, ``masks`` [B, N, 1, side, side], probabilities within the boxes;
            the best first. ``count`` [B] says how many of the N are detections; the others are 0.
        """
        detections = fields(self.detect(self.prepare(images, sizes))[0])
        outputs = {name: value.unflatten(0, (-1, self.most)) for name, value in detections.items()}
        there = outputs["scores"] > 0
        if "masks" in outputs:
            outputs["masks"] = outputs["masks"] * there[:, :, None, None, None]
        return {**outputs, "count": there.sum(1)}

    def prepare(self, images: Tensor, sizes: Tensor) -> ImageList:
        """Images as the backbone takes them: normalised, and 0 outside of each."""
        pixels = images.float().movedim(-1, -3)
        pixels = pixels if self.rgb else pixels.flip(-3)
        pixels = (pixels - self.model.pixel_mean) / self.model.pixel_std
        rows, columns = (
            torch.arange(side, device=pixels.device) < sizes[:, axis : axis + 1]
            for axis, side in enumerate(pixels.shape[2:])
        )
        inside = (rows[:, :, None] & columns[:, None])[:, None]
        return ImageList(torch.where(inside, pixels, 0.0), [sizes.float()])

    def detect(self, images: ImageList) -> list[Instances]:
        """Detections on each image; in ``exportable_detections`` one object for all images."""
        model = self.model
        features = model.backbone(images.tensor)
        if isinstance(model, GeneralizedRCNN):
            proposals, _ = model.proposal_generator(images, features, None)
            return model.roi_heads(images, features, proposals, None)[0]
        features = [features[name] for name in model.head_in_features]
        return model.forward_inference(images, features, model.head(features))
