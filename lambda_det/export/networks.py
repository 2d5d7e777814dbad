"""What is exported: a backbone or a detector as a function of one tensor, beside its original."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from detectron2.modeling import Backbone
from detectron2.modeling.meta_arch import GeneralizedRCNN
from detectron2.modeling.meta_arch.dense_detector import DenseDetector
from detectron2.structures import ImageList, Instances
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.detection.registry import why_not_exported
from lambda_det.errors import ConfigError
from lambda_det.export.portable import portable_copy
from lambda_det.modeling.fold import fold_norms

__all__ = ["Network", "backbone_network", "detector_network", "fields", "is_rcnn"]


@dataclass(frozen=True)
class Network:
    """A network to export.

    Attributes:
        module: maps the input to a dict of tensors, in operators that a graph can hold.
        original: computes the same without an export, to compare with.
        detector: whether the input is one image [3, H, W] of ``pixels``, and the output the
            detections on it; else it is a batch [B, 3, H, W] of images normalised already.
        pixels: what the input holds, for those who will feed it.
        features: of a detector, the maps that it detects on, as ``module`` computes them and as
            ``original`` does.
        prove: compares the file of a detector with it on validation images; None where its run is
            not known.
        batch: of a detector, images that the file takes at once, 0 for any number; None for one
            image alone, of any number of boxes.
        fixed: height and width of a batch; None for any.
    """

    module: nn.Module
    original: Callable[[Tensor], dict[str, Tensor]]
    detector: bool
    pixels: Mapping[str, Any] = field(default_factory=dict)
    features: tuple[Callable[[Tensor], dict[str, Tensor]], ...] = ()
    prove: Callable[[Any], Any] | None = None
    batch: int | None = None
    fixed: tuple[int, int] | None = None

    @property
    def stride(self) -> int:
        """Sides of the input are multiples of it."""
        if self.batch is not None:
            return max(self.module.model.backbone.size_divisibility, 1)
        return self.pixels.get("size_divisibility") or 1

    @property
    def device(self) -> torch.device:
        return next(self.module.parameters()).device


def backbone_network(backbone: Backbone, pixels: Mapping[str, Any] | None = None) -> Network:
    """A backbone: images [B, 3, H, W], normalised, to features by name.

    Raises:
        ConfigError: a part of it cannot be exported.
    """
    check_exportable(backbone)
    module = portable_copy(fold_norms(backbone))
    return Network(module, backbone.eval(), detector=False, pixels=pixels or {})


def detector_network(
    model: nn.Module,
    pixels: Mapping[str, Any] | None = None,
    *,
    batch: int | None = None,
    fixed: tuple[int, int] | None = None,
) -> Network:
    """A detector: one image [3, H, W] of float32 pixels 0 to 255 to its detections.

    The output has the fields of Detectron2's ``Instances``, boxes in pixels of the input, and masks
    as probabilities [N, 1, side, side] within their box. ``detector_postprocess`` takes them to the
    size of an image. With ``batch`` or ``fixed``, see :class:`Network`, it is
    :class:`lambda_det.export.batches.BatchGraph`.

    Raises:
        ConfigError: it is no detector of boxes, or a part of it cannot be exported.
    """
    check_exportable(model)
    if batch is not None or fixed:
        from lambda_det.export.batches import BatchGraph  # which is made of this module

        pixels = pixels or {}
        graphs = [
            BatchGraph(made, rgb=pixels.get("input_format") == "RGB")
            for made in (portable_copy(fold_norms(model)), model.eval())
        ]
        return Network(
            graphs[0],
            graphs[1].original,
            detector=True,
            pixels=pixels,
            features=tuple([lambda *x, g=g: g.model.backbone(g.prepare(*x)) for g in graphs]),
            batch=1 if batch is None else batch,
            fixed=fixed,
        )
    graph = DetectorGraph(portable_copy(fold_norms(model)))
    detector = DetectorGraph(model.eval())

    def prepared(image: Tensor) -> ImageList:
        return model.preprocess_image([{"image": image}])

    return Network(
        graph,
        lambda image: fields(detector.detect(prepared(image))),
        detector=True,
        pixels=pixels or {},
        features=(
            lambda image: graph.model.backbone(prepared(image).tensor),
            lambda image: model.backbone(prepared(image).tensor),
        ),
    )


def check_exportable(model: nn.Module) -> None:
    """Refuse what no graph would carry, or would carry wrong.

    Raises:
        ConfigError: names the part and the reason.
    """
    for name, module in model.named_modules():
        if sides := getattr(module, "map_size", None):
            raise ConfigError(
                f"{name} has global position embeddings, which hold for maps of up to "
                f"{'x'.join(map(str, sides))} positions, and an exported graph would not notice a "
                "larger one; export a network with a local scope."
            )


def fields(instances: Instances) -> dict[str, Tensor]:
    """The tensors of ``instances`` by name; boxes as [N, 4]."""
    return {
        name: getattr(value, "tensor", value)
        for name, value in sorted(instances.get_fields().items())
    }


class DetectorGraph(nn.Module):
    """A detector of Detectron2 on one image, without resizing and without pasting masks.

    Args:
        model: in evaluation mode.

    Raises:
        ConfigError: how it predicts is not known.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        # Only those classes themselves: a derived one, such as PanopticFPN, does more
        plain = type(model).inference is GeneralizedRCNN.inference if is_rcnn(model) else True
        why = why_not_exported(model)
        if not (plain and (is_rcnn(model) or isinstance(model, DenseDetector))):
            why = (
                f"{type(model).__name__} does not predict boxes as GeneralizedRCNN or a "
                "DenseDetector does"
            )
        elif is_rcnn(model) and model.proposal_generator is None:
            why = "The detector takes its proposals from a file"
        elif model.backbone.padding_constraints.get("square_size", 0) > 0:
            why = "The backbone wants square images, which an exported detector does not make"
        if why:
            raise ConfigError(f"{why}; export only the backbone instead.")
        self.model = model

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Map one image [3, H, W] to its detections, by field."""
        model = self.model
        divisor = model.backbone.size_divisibility
        height, width = image.shape[1:]
        pixels = (image - model.pixel_mean) / model.pixel_std
        if divisor > 1:
            # By arithmetic on sizes: ImageList.from_tensors goes through tensors of them
            after_y = (height + divisor - 1) // divisor * divisor - height
            after_x = (width + divisor - 1) // divisor * divisor - width
            pixels = F.pad(pixels, (0, after_x, 0, after_y))
        return fields(self.detect(ImageList(pixels[None], [(height, width)])))

    def detect(self, images: ImageList) -> Instances:
        """Detections on a batch of one."""
        model = self.model
        features = model.backbone(images.tensor)
        if is_rcnn(model):
            proposals, _ = model.proposal_generator(images, features, None)
            return model.roi_heads(images, features, proposals, None)[0][0]
        features = [features[name] for name in model.head_in_features]
        return model.forward_inference(images, features, model.head(features))[0]


def is_rcnn(model: nn.Module) -> bool:
    return isinstance(model, GeneralizedRCNN)
