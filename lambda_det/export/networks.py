"""What is exported: a backbone or a detector as a function of one tensor, beside its original."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from detectron2.layers import batched_nms
from detectron2.modeling import Backbone
from detectron2.modeling.meta_arch import GeneralizedRCNN
from detectron2.modeling.meta_arch.dense_detector import DenseDetector
from detectron2.structures import Boxes, ImageList, Instances
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.detection.registry import why_not_exported
from lambda_det.errors import ConfigError
from lambda_det.export.detections import CANDIDATES, DENSE, NO_NMS
from lambda_det.export.portable import dense, portable_copy
from lambda_det.modeling.fold import fold_norms

__all__ = [
    "OUTSIDE",
    "Network",
    "backbone_network",
    "detector_network",
    "fields",
    "is_rcnn",
    "kept",
    "takes_rgb",
]

ALL = 2**31 - 1  # detections, of which there are fewer
OUTSIDE = ("resize", "normalise", "nms")  # what may be left to the user of a detector's .onnx


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
        outside: of ``OUTSIDE``, what the file leaves to its user.
        pasted: whether its masks are those of the image, and not within their boxes.
        finish: makes of the outputs for an input, without NMS, what ``original`` has.
    """

    module: nn.Module
    original: Callable[[Tensor], dict[str, Tensor]]
    detector: bool
    pixels: Mapping[str, Any] = field(default_factory=dict)
    features: tuple[Callable[[Tensor], dict[str, Tensor]], ...] = ()
    prove: Callable[[Any], Any] | None = None
    batch: int | None = None
    fixed: tuple[int, int] | None = None
    outside: Collection[str] = ()
    pasted: bool = False
    finish: Callable[..., dict[str, Tensor]] | None = None

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
    outside: Collection[str] = (),
    pasted: bool = False,
) -> Network:
    """A detector: one image [3, H, W] of float32 pixels 0 to 255 to its detections.

    The output has the fields of Detectron2's ``Instances``, boxes in pixels of the input, and masks
    as probabilities [N, 1, side, side] within their box. ``detector_postprocess`` takes them to the
    size of an image. With ``batch`` or ``fixed``, see :class:`Network`, it is a
    :class:`BatchGraph`. With ``outside``, the image may also be of uint8 or normalised; without NMS
    boxes may reach beyond it, and are all those above the threshold, of a batch ``CANDIDATES``.

    Raises:
        ConfigError: it is no detector of boxes, or a part of it cannot be exported.
    """
    check_exportable(model)
    pixels, outside, kind = {**limits(model), **(pixels or {})}, {*outside}, DetectorGraph
    if batch is not None or fixed:
        batch, kind = 1 if batch is None else batch, BatchGraph
    if batch is not None or "normalise" in outside:
        outside.add("resize")
    if unknown := outside - {*OUTSIDE}:
        raise ConfigError(f"{unknown.pop()!r} cannot be outside; {', '.join(OUTSIDE)} can.")
    heads = getattr(model, "roi_heads", None)
    with_masks = getattr(heads, "mask_on", False)
    if pasted and not with_masks:
        raise ConfigError("The detector has no masks that could be pasted.")
    if "nms" in outside and (with_masks or getattr(heads, "keypoint_on", False)):
        raise ConfigError(
            "Masks and keypoints are those of the boxes that NMS keeps, so it cannot be outside of "
            "a detector that has them."
        )
    rgb, copied = pixels.get("input_format") == "RGB", portable_copy(fold_norms(model))
    if "nms" in outside:
        for module in copied.modules():
            if hasattr(module, "test_nms_thresh"):
                most = ALL if batch is None else CANDIDATES
                module.test_topk_per_image = module.max_detections_per_image = most
                module.test_nms_thresh = NO_NMS
    graphs = [kind(each, outside, rgb) for each in (copied, model.eval())]
    return Network(
        graphs[0],
        graphs[1].original,
        detector=True,
        pixels=pixels,
        features=tuple(graph.features for graph in graphs),
        batch=batch,
        fixed=fixed,
        outside=[word for word in OUTSIDE if word in outside],
        pasted=pasted,
        finish=graphs[1].finish if "nms" in outside else None,
    )


def takes_rgb(outside: Collection[str]) -> bool:
    """Whether images are [.., H, W, 3] of uint8, RGB, and not [.., 3, H, W] of floats."""
    return "resize" in outside and "normalise" not in outside


def limits(model: nn.Module) -> dict[str, Any]:
    """By what a detector chooses its boxes in the end; nothing where that is not known."""
    for module in model.modules():
        if hasattr(module, "test_nms_thresh"):
            is_dense = isinstance(module, DenseDetector)
            most = module.max_detections_per_image if is_dense else module.test_topk_per_image
            return {
                "score_threshold": module.test_score_thresh,
                "nms_threshold": module.test_nms_thresh,
                "detections_per_image": most,
            }
    return {}


def kept(boxes: Tensor, scores: Tensor, classes: Tensor, described: Mapping[str, Any]) -> Tensor:
    """Which candidates of an image NMS by class keeps, with the numbers of :func:`limits`."""
    index = batched_nms(boxes, scores, classes, described["nms_threshold"])
    most = described["detections_per_image"]
    return index if most < 0 else index[:most]


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


def _inside(instances: Instances) -> Instances:
    """Those of which something is inside of the image, cut at its border."""
    instances.pred_boxes.clip(instances.image_size)
    return instances[instances.pred_boxes.nonempty().nonzero()[:, 0]]


class DetectorGraph(nn.Module):
    """A detector of Detectron2 on one image, without resizing and without pasting masks.

    Args:
        model: in evaluation mode.
        outside: see :class:`Network`.
        rgb: whether the model wants RGB, as images of uint8 are.

    Raises:
        ConfigError: how it predicts is not known.
    """

    def __init__(self, model: nn.Module, outside: Collection[str] = (), rgb: bool = False) -> None:
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
        self.model, self.outside, self.rgb = model, outside, rgb

    def normalised(self, images: Tensor) -> Tensor:
        """Images as :func:`takes_rgb` says to [.., 3, H, W] as the backbone takes it."""
        if "normalise" in self.outside:
            return images
        if takes_rgb(self.outside):
            images = images.float().movedim(-1, -3)
            images = images if self.rgb else images.flip(-3)
        return (images - self.model.pixel_mean) / self.model.pixel_std

    def prepare(self, image: Tensor) -> ImageList:
        """One image as the backbone takes it."""
        divisor, pixels = self.model.backbone.size_divisibility, self.normalised(image)
        height, width = pixels.shape[1:]
        if divisor > 1:
            # By arithmetic on sizes: ImageList.from_tensors goes through tensors of them
            after_y = (height + divisor - 1) // divisor * divisor - height
            after_x = (width + divisor - 1) // divisor * divisor - width
            pixels = F.pad(pixels, (0, after_x, 0, after_y))
        return ImageList(pixels[None], [(height, width)])

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        """Map one image to its detections, by field."""
        (found,) = self.detect(self.prepare(image))
        return fields(found if "nms" in self.outside else _inside(found))

    def original(self, image: Tensor) -> dict[str, Tensor]:
        """The same by Detectron2, to compare with."""
        divisor = self.model.backbone.size_divisibility
        images = ImageList.from_tensors([self.normalised(image)], divisor)
        return fields(_inside(self.detect(images)[0]))

    def finish(self, outputs: dict[str, Tensor], *given: Tensor) -> dict[str, Tensor]:
        """See :class:`Network`."""
        return self._finish(self.normalised(*given).shape[1:], *outputs.values())

    def _finish(self, size: tuple[int, int], *values: Tensor) -> dict[str, Tensor]:
        boxes, classes, scores = values
        there = kept(boxes, scores, classes, limits(self.model))
        found = Instances(size, pred_boxes=Boxes(boxes), pred_classes=classes, scores=scores)
        return fields(_inside(found[there]))

    def features(self, *x: Tensor) -> dict[str, Tensor]:
        return self.model.backbone(self.prepare(*x).tensor)

    def detect(self, images: ImageList) -> list[Instances]:
        """Detections on each image; of a batch in the form of ``exportable_detections`` on all."""
        model = self.model
        features = model.backbone(images.tensor)
        if is_rcnn(model):
            proposals, _ = model.proposal_generator(images, features, None)
            return model.roi_heads(images, features, proposals, None)[0]
        features = [features[name] for name in model.head_in_features]
        return model.forward_inference(images, features, model.head(features))


class BatchGraph(DetectorGraph):
    """A detector of Detectron2 on images of one size, each of which may fill only a part of it."""

    def __init__(self, model: nn.Module, *form: Any) -> None:
        super().__init__(model, *form)
        if not (is_rcnn(model) or isinstance(model, DENSE)):
            raise ConfigError(f"{type(model).__name__} is exported for one image, without --batch.")
        self.most = limits(model)["detections_per_image"]
        if self.most < 1:
            raise ConfigError(
                f"TEST.DETECTIONS_PER_IMAGE is {self.most}; a batch has a fixed number for each "
                "image."
            )

    def prepare(self, images: Tensor, sizes: Tensor) -> ImageList:
        """Images of heights and widths [B, 2] as the backbone takes them."""
        pixels = self.normalised(images)
        if "normalise" in self.outside:  # laid out as bytes are, for a graph that holds for one
            pixels = dense(pixels.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        y, x = (
            torch.arange(side, device=pixels.device) < sizes[:, i : i + 1]
            for i, side in enumerate(pixels.shape[2:])
        )
        inside = (y[:, :, None] & x[:, None])[:, None]
        return ImageList(torch.where(inside, pixels, 0.0), [sizes.float()])

    def forward(self, images: Tensor, sizes: Tensor) -> dict[str, Tensor]:
        """Map images and their heights and widths [B, 2] to detections.

        Returns:
            ``boxes`` [B, N, 4], ``classes`` and ``scores`` [B, N], and ``masks`` [B, N, 1, side,
            side] of a detector that has them, the best first; ``count`` [B] of them are found.
        """
        outputs = {
            name.removeprefix("pred_"): value.unflatten(0, (-1, self.most))
            for name, value in fields(self.detect(self.prepare(images, sizes))[0]).items()
        }
        there = outputs["scores"] > 0
        if "masks" in outputs:
            outputs["masks"] = outputs["masks"] * there[:, :, None, None, None]
        return {**outputs, "count": there.sum(1)}

    def original(self, images: Tensor, sizes: Tensor) -> dict[str, Tensor]:
        images = ImageList(self.prepare(images, sizes).tensor, [*map(tuple, sizes.tolist())])
        return self._stacked([fields(_inside(instances)) for instances in self.detect(images)])

    def finish(self, outputs: dict[str, Tensor], *given: Tensor) -> dict[str, Tensor]:
        *values, counts = outputs.values()
        each = zip(given[1].tolist(), counts.tolist(), *values, strict=True)
        return self._stacked([self._finish(size, *(x[:n] for x in xs)) for size, n, *xs in each])

    def _stacked(self, found: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        """What is found on each image, with those that are missing."""
        outputs = {
            name.removeprefix("pred_"): torch.stack(
                [
                    F.pad(x[name].movedim(0, -1), (0, self.most - len(x[name]))).movedim(-1, 0)
                    for x in found
                ]
            )
            for name in found[0]
        }
        return {**outputs, "count": torch.tensor([len(x["scores"]) for x in found])}


def is_rcnn(model: nn.Module) -> bool:
    return isinstance(model, GeneralizedRCNN)
