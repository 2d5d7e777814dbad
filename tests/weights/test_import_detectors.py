"""Detectors of torchvision against ours with their weights, in float64: every stage of both."""

import re
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import torchvision
from detectron2.config import CfgNode
from detectron2.data import MetadataCatalog
from detectron2.structures import Boxes
from torch import Tensor, nn
from torchvision.models import detection, resnet50
from torchvision.models.detection._utils import overwrite_eps
from torchvision.models.detection.backbone_utils import _resnet_fpn_extractor
from torchvision.ops import boxes as box_ops
from torchvision.ops.misc import FrozenBatchNorm2d

from lambda_det.detection import load_config, parser
from lambda_det.detection.task import DetectionTask
from lambda_det.errors import WeightsError
from lambda_det.weights.import_names import import_weights
from lambda_det.weights.loading import load
from tests.detection.tiny import on_meta

PROPOSALS = 15  # of an image
SIZES = ((64, 96), (115, 67))  # of images; some maps of their batch have odd sides
COCO = torchvision.models.get_weight("MaskRCNN_ResNet50_FPN_V2_Weights.COCO_V1").meta["categories"]
OBJECTS = [c for c, name in enumerate(COCO) if name not in ("__background__", "N/A")]


def _frozen_rcnn(network: type[nn.Module], **options) -> nn.Module:
    """Version 1 as its published weights are: frozen norms that add nothing to the variance."""
    backbone = _resnet_fpn_extractor(resnet50(norm_layer=FrozenBatchNorm2d), 5)
    model = network(backbone, options["num_classes"])
    overwrite_eps(model, 0.0)
    return model


# By the recipe with its structure: what makes theirs
THEIRS = {
    "mask_rcnn_resnet50_coco": partial(detection.maskrcnn_resnet50_fpn_v2, weights_backbone=None),
    "faster_rcnn_resnet50_coco": partial(
        detection.fasterrcnn_resnet50_fpn_v2, weights_backbone=None
    ),
    "mask_rcnn_resnet50_coco_v1": partial(_frozen_rcnn, detection.MaskRCNN),
    "faster_rcnn_resnet50_coco_light": partial(_frozen_rcnn, detection.FasterRCNN),
    "retinanet_resnet50_coco": partial(detection.retinanet_resnet50_fpn_v2, weights_backbone=None),
}


@torch.no_grad()
def make(recipe: str, classes: int = len(COCO)) -> nn.Module:
    """Their detector with random weights, in float64 and evaluation mode; every tensor counts.

    The statistics of norms and the sizes of what the last layers predict are measured on
    images; else rounding errors would grow from layer to layer, and boxes have no width.
    """
    torch.manual_seed(0)
    model = THEIRS[recipe](num_classes=classes).double().eval()
    hooks = []
    for name, module in model.named_modules():
        if hasattr(module, "running_var"):
            hooks.append(module.register_forward_pre_hook(_measure))
        elif name.endswith(("cls_logits", "cls_score", "bbox_pred", "bbox_reg")):
            size = 3 if "cls" in name else 2 if "box_predictor" in name else 0.2
            hooks.append(module.register_forward_hook(partial(_spread, size)))
    for name, tensor in model.state_dict().items():
        if tensor.ndim == 1:
            tensor.uniform_(0.5, 1.5) if "weight" in name else tensor.normal_(0, 0.1)
    if hasattr(model, "rpn"):
        model.rpn._post_nms_top_n["testing"] = PROPOSALS
    model.transform.resize = lambda image, target: (image, target)
    heads = getattr(model, "roi_heads", SimpleNamespace(detections_per_img=0))
    most, heads.detections_per_img = heads.detections_per_img, PROPOSALS  # have masks here
    model(_images()[0])
    heads.detections_per_img = most
    for hook in hooks:
        hook.remove()
    for name, tensor in model.state_dict().items():
        if name.endswith(("cls_score.bias", "classification_head.cls_logits.bias")):
            by_class = tensor.unflatten(0, (-1, classes))
            by_class[:, [c for c, there in enumerate(COCO[:classes]) if there == "N/A"]] = -100
            by_class[:, 0] = 0 if "cls_score" in name else -100  # no object has these
    return model


_SPREAD = weakref.WeakSet()


def _measure(norm: nn.Module, inputs: tuple[Tensor]) -> None:
    norm.running_var, norm.running_mean = torch.var_mean(inputs[0], (0, 2, 3))


def _spread(size: float, layer: nn.Module, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    factor = size / output.std()
    if layer in _SPREAD:  # a head sees several maps
        factor = factor.clamp(max=1)
    _SPREAD.add(layer)
    layer.weight.mul_(factor)
    return output * factor


def read(recipe: str, *pairs: str) -> CfgNode:
    arguments = ["--config-file", f"configs/finetune/{recipe}.yaml", "MODEL.DEVICE", "cpu"]
    return load_config(parser().parse_args([*arguments, *pairs]))


def start(theirs: nn.Module, recipe: str, *pairs: str) -> nn.Module:
    """Our detector as a training would start with their weights."""
    task = DetectionTask(read(recipe, *pairs))
    model = task.components.make_model().double()
    load(model, "w.pth", import_weights(theirs.state_dict(), "w.pth"), pixels=task.pixels)
    for buffer, values in (
        (model.pixel_mean, task.pixels.mean),
        (model.pixel_std, task.pixels.std),
    ):
        buffer[:, 0, 0] = torch.tensor(values, dtype=torch.float64)  # they were rounded to float32
    return model.eval()


@pytest.fixture
def in_float64(monkeypatch):
    """Detectron2's boxes and deltas stay as they are, which are float32 otherwise."""

    def keep(boxes: Boxes, tensor: Tensor) -> None:
        boxes.tensor = tensor.reshape(-1, 4)

    monkeypatch.setattr(Boxes, "__init__", keep)
    monkeypatch.setattr(Tensor, "float", lambda tensor: tensor)


def close(found: Tensor, expected: Tensor, tolerance: float = 1e-9) -> None:
    assert found.shape == expected.shape and found.numel()
    error = (found - expected).abs().max() / expected.abs().max()
    assert error <= tolerance


def _images() -> tuple[list[Tensor], list[dict]]:
    """RGB from 0 to 1, and the same for Detectron2."""
    images = [torch.rand(3, *size, dtype=torch.float64) for size in SIZES]
    return images, [{"image": 255 * image} for image in images]


def _compare_features(theirs: nn.Module, ours: nn.Module) -> SimpleNamespace:
    """Pixels and maps of both."""
    pictures, batch = _images()
    images, _ = theirs.transform(pictures)
    own = ours.preprocess_image(batch)
    close(own.tensor, images.tensors)
    maps, features = theirs.backbone(images.tensors), ours.backbone(own.tensor)
    for name, expected in zip(features, maps.values(), strict=True):
        close(features[name], expected)
    return SimpleNamespace(**locals())


def _compare_detections(s: SimpleNamespace, expected: list[dict], ours: nn.Module) -> None:
    found = ours(s.batch)
    names = MetadataCatalog.get("coco_2017_val").thing_classes
    for there, here in zip(expected, found, strict=True):
        here = here["instances"]
        here = here[here.pred_boxes.nonempty(0.01)]  # of which theirs drop the others
        assert len(here) >= 10
        close(here.scores, there["scores"], 1e-6)
        close(here.pred_boxes.tensor, there["boxes"], 1e-6)
        assert [names[c] for c in here.pred_classes] == [COCO[c] for c in there["labels"]]


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize(
    "recipe",
    # Of each version, which has all of its Faster R-CNN
    ["mask_rcnn_resnet50_coco", "mask_rcnn_resnet50_coco_v1"],
)
def test_an_rcnn_is_theirs_at_every_stage(recipe, in_float64):
    theirs = make(recipe)
    counts = {"PRE": 1000, "POST": PROPOSALS}  # theirs
    pairs = [word for key, n in counts.items() for word in (f"MODEL.RPN.{key}_NMS_TOPK_TEST", n)]
    ours = start(theirs, recipe, *map(str, pairs))
    s = _compare_features(theirs, ours)

    features = list(s.features.values())
    proposals, _ = theirs.rpn(s.images, s.maps)
    ours.proposal_generator.min_box_size = theirs.rpn.min_size
    here, _ = ours.proposal_generator(s.own, s.features)
    for one, other in zip(here, proposals, strict=True):
        close(one.proposal_boxes.tensor, other)

    # Equal proposals
    heads, own = theirs.roi_heads, ours.roi_heads
    boxes = [Boxes(tensor) for tensor in proposals]
    expected = heads.box_head(heads.box_roi_pool(s.maps, proposals, s.images.image_sizes))
    found = own.box_head(own.box_pooler(features[:4], boxes))
    close(found, expected)
    for one, other, classes in zip(
        own.box_predictor(found),
        heads.box_predictor(expected),
        ([*OBJECTS, 0], [4 * c + i for c in OBJECTS for i in range(4)]),
        strict=True,
    ):
        close(one, other[:, classes])
    pooled = heads.mask_roi_pool(s.maps, proposals, s.images.image_sizes)
    expected = heads.mask_predictor(heads.mask_head(pooled))
    found = own.mask_head.layers(own.mask_pooler(features[:4], boxes))
    close(found, expected[:, OBJECTS])
    heads.mask_head, own.mask_on = None, False  # of detections they take longest
    _compare_detections(s, theirs(s.pictures), ours)


def _by_size(tensor: Tensor) -> Tensor:
    """Anchors [..., A, C] of all places, 3 ratios of 3 sizes there, in our order."""
    order = [3 * ratio + size for size in range(3) for ratio in range(3)]
    return tensor.unflatten(-2, (-1, 9))[..., order, :].flatten(-3, -2)


@pytest.mark.slow
@torch.no_grad()
def test_a_retinanet_is_theirs_at_every_stage(in_float64, monkeypatch):
    theirs = make("retinanet_resnet50_coco")
    ours = start(theirs, "retinanet_resnet50_coco")
    s = _compare_features(theirs, ours)
    maps, features = list(s.maps.values()), list(s.features.values())
    expected = theirs.head(maps)
    scores, deltas = ours._transpose_dense_predictions(ours.head(features), [80, 4])
    close(torch.cat(scores, 1), _by_size(expected["cls_logits"])[..., OBJECTS])
    close(torch.cat(deltas, 1), _by_size(expected["bbox_regression"]))
    # Detectron2 clips boxes to the image after the suppression
    with monkeypatch.context() as context:
        context.setattr(box_ops, "clip_boxes_to_image", lambda boxes, size: boxes)
        results = theirs(s.pictures)
    for result, image in zip(results, s.pictures, strict=True):
        result["boxes"] = box_ops.clip_boxes_to_image(result["boxes"], image.shape[1:])
        kept = box_ops.remove_small_boxes(result["boxes"], 0.01)
        result.update({key: value[kept] for key, value in result.items()})
    _compare_detections(s, results, ours)


# ----------------------------------------------------------------- names, and what cannot be theirs
def _imported(recipe: str, classes: int = len(COCO), rename: Callable[[str], str] = str) -> dict:
    """What a file of theirs holds, with shapes and without values."""
    with torch.device("meta"):
        state = THEIRS[recipe](num_classes=classes).state_dict()
        return import_weights({rename(name): t for name, t in state.items()}, "w.pth")


def _first_names(name: str) -> str:
    """Of the files that torchvision wrote before its version 0.13."""
    name = re.sub(r"(inner_blocks|layer_blocks)\.(\d)\.0\.", r"\1.\2.", name)
    name = re.sub(r"mask_head\.(\d)\.0\.", lambda m: f"mask_head.mask_fcn{int(m[1]) + 1}.", name)
    return name.replace("rpn.head.conv.0.0.", "rpn.head.conv.")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "rename"),
    [*((name, str) for name in THEIRS), ("mask_rcnn_resnet50_coco_v1", _first_names)],
    ids=[*THEIRS, "names before 0.13"],
)
def test_every_tensor_has_its_place(recipe, rename):
    found = _imported(recipe, rename=rename)["model"]
    ours = on_meta(read(recipe)).state_dict()
    expected = {name: tensor.shape for name, tensor in ours.items() if "tracked" not in name}
    assert {name: tensor.shape for name, tensor in found.items()} == expected


CLASSES_OF = {"mask_rcnn_resnet50_coco": "ROI_HEADS", "retinanet_resnet50_coco": "RETINANET"}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", CLASSES_OF)
def test_layers_of_other_classes_start_afresh(recipe, caplog):
    model = on_meta(read(recipe, f"MODEL.{CLASSES_OF[recipe]}.NUM_CLASSES", "3"))
    caplog.set_level("INFO")
    load(model, "w.pth", _imported(recipe))
    first = r"(roi_heads\.box_predictor|head)\.cls_score\.weight"
    assert re.search(rf"start afresh: ({first}, .+); unused in the file: \1;", caplog.text)
    # As many others, the first of which is the background
    caplog.clear()
    load(model, "w.pth", _imported(recipe, 4))
    assert NOTHING_LEFT in caplog.text


NOTHING_LEFT = "start afresh: none; unused in the file: none;"


@pytest.mark.slow
def test_norms_that_are_trained_have_counters_which_their_file_lacks(caplog):
    names = ("FPN", "ROI_BOX_HEAD", "ROI_MASK_HEAD")
    pairs = [word for name in names for word in (f"MODEL.{name}.NORM", "BN")]
    recipe = "mask_rcnn_resnet50_coco"
    caplog.set_level("INFO")
    load(on_meta(read(recipe, *pairs)), "w.pth", _imported(recipe))
    assert NOTHING_LEFT in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize(
    ("theirs", "ours", "pairs", "key"),
    [
        ("mask_rcnn_resnet50_coco", "mask_rcnn_resnet50_coco_v1", (), "MODEL.RPN.CONV_DIMS"),
        *(
            ("mask_rcnn_resnet50_coco", "mask_rcnn_resnet50_coco", (f"MODEL.{key}", value), words)
            for key, value, words in (
                ("FPN.NORM", "", "MODEL.FPN.IN_FEATURES and NORM"),
                ("ROI_BOX_HEAD.NUM_CONV", "2", "MODEL.ROI_BOX_HEAD.NUM_CONV"),
                ("ROI_MASK_HEAD.NORM", "", "MODEL.ROI_MASK_HEAD"),
                ("ROI_MASK_HEAD.POOLER_TYPE", "ROIAlignV2", "MODEL.ROI_MASK_HEAD.POOLER_TYPE"),
                ("LAMBDA_RESNET.NAME", "resnet_rs50", "name and options of the backbone"),
            )
        ),
        ("mask_rcnn_resnet50_coco", "retinanet_resnet50_coco", (), "MODEL.META_ARCHITECTURE"),
        ("retinanet_resnet50_coco", "faster_rcnn_resnet50_coco", (), "MODEL.META_ARCHITECTURE"),
    ],
)
def test_another_structure_is_refused_by_its_key(theirs, ours, pairs, key):
    with pytest.raises(WeightsError) as caught:
        load(on_meta(read(ours, *pairs)), "w.pth", _imported(theirs))
    message = str(caught.value)
    assert key in message and "w.pth" in message and "torchvision" in message
    assert "\n" not in message


@pytest.mark.slow
def test_masks_may_start_afresh_or_be_left_out():
    for ours, theirs in (("mask", "faster"), ("faster", "mask")):
        model = on_meta(read(f"{ours}_rcnn_resnet50_coco"))
        load(model, "w.pth", _imported(f"{theirs}_rcnn_resnet50_coco"))
