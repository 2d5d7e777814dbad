"""The parts of TPU's Mask R-CNN against their formulas in float64, and the two configurations."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path

import pytest
import torch
from detectron2.layers import ShapeSpec
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.backbone import Backbone
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher
from detectron2.modeling.poolers import ROIPooler
from detectron2.structures import Boxes, Instances
from detectron2.utils.events import EventStorage
from torch import Tensor, nn
from torch.nn import functional as F

from lambda_det.detection import (
    DetectionTask,
    lazy_parser,
    load_config,
    load_lazy_config,
    parser,
    run,
)
from lambda_det.detection.data import register_shapes
from lambda_paper import tpu
from tests.detection.tiny import TINY, on_meta
from tests.shapes import make_shapes

CONFIG = Path(__file__).parents[1] / "mask_rcnn_lambdaresnet152_tpu"
LEVELS = ["p2", "p3", "p4", "p5", "p6"]
# tests/detection/tiny.py leaves one convolution in the RPN
TWO = ("MODEL.RPN.CONV_DIMS [-1,-1]", "model.proposal_generator.head.conv_dims=[-1,-1]")


@pytest.fixture(autouse=True)
def in_float64():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def tasks(options: tuple[str, str] = ("", "")) -> list[DetectionTask]:
    """Of the YAML file and of the LazyConfig."""
    files = (f"{CONFIG}.yaml", f"{CONFIG}.py")
    given = [
        argparse.Namespace(config_file=file, opts=words.split())
        for file, words in zip(files, options, strict=True)
    ]
    return [DetectionTask(load_config(given[0])), DetectionTask(load_lazy_config(given[1]))]


def normed(x: Tensor) -> Tensor:
    """Batch norm with fresh weights and TPU's epsilon."""
    axes = [0, *range(2, x.dim())]
    var, mean = torch.var_mean(x, axes, correction=0, keepdim=True)
    return (x - mean) / (var + 1e-4).sqrt()


class Maps(Backbone):
    """Given maps as a backbone."""

    def __init__(self, maps: dict[str, Tensor]) -> None:
        super().__init__()
        self.maps = maps
        self._out_features = list(maps)
        self._out_feature_channels = {name: x.shape[1] for name, x in maps.items()}
        self._out_feature_strides = {f"res{level}": 2**level for level in range(2, 6)}

    def forward(self, x: None) -> dict[str, Tensor]:
        return self.maps


@pytest.mark.parametrize("side", [4, 5])  # of the smallest map
def test_the_fpn(side):
    maps = {
        f"res{level}": torch.randn(2, level, *[side * 2 ** (5 - level)] * 2)
        for level in range(2, 6)
    }
    fpn = tpu.TPUFPN(
        bottom_up=Maps(maps), in_features=list(maps), out_channels=8, norm="BN", image_size=1024
    )
    found = fpn(None)
    above, wanted = 0, {}
    for level in (5, 4, 3, 2):
        lateral, output = (getattr(fpn, f"fpn_{part}{level}") for part in ("lateral", "output"))
        kernel = lateral.weight[:, :, 0, 0]
        assert kernel.abs().max() <= (6 / sum(kernel.shape)) ** 0.5  # Glorot's
        x = torch.einsum("oi,bihw->bohw", kernel, maps[f"res{level}"])
        above = x + (above if level == 5 else above.repeat_interleave(2, 2).repeat_interleave(2, 3))
        wanted[f"p{level}"] = F.conv2d(above, output.weight, padding=1)
    # "Same": as much as a third row needs, the odd one at the end
    before, p6 = side % 2, fpn.top_block.p6
    padded = torch.zeros(2, 8, side + before + 1, side + before + 1)
    padded[:, :, before : before + side, before : before + side] = wanted["p5"]
    wanted["p6"] = F.conv2d(padded, p6.weight, stride=2)
    assert list(found) == LEVELS and found["p6"].shape[-1] == (side + 1) // 2
    for name, x in wanted.items():
        torch.testing.assert_close(found[name], normed(x))
    assert fpn.padding_constraints == {"square_size": 1024}


def test_the_rpn_s_convolutions_are_shared_and_their_norms_are_not():
    head = tpu.TPURPNHead(in_channels=6, num_anchors=3, conv_dims=[-1, 5], norm="BN", levels=2)
    features = [torch.randn(2, 6, 8, 8), 9 + torch.randn(2, 6, 4, 4)]
    for index, (logits, deltas) in enumerate(zip(*head(features), strict=True)):
        x = features[index]
        for conv in head.conv:
            x = normed(F.conv2d(x, conv.weight, padding=1)).relu()
        torch.testing.assert_close(logits, head.objectness_logits(x))
        torch.testing.assert_close(deltas, head.anchor_deltas(x))
    assert len({id(norm) for norms in head.norms for norm in norms}) == 4
    one = tpu.TPURPNHead(in_channels=6, num_anchors=3, norm="BN", levels=1)
    assert one(features[:1])[0][0].shape == (2, 3, 8, 8)


def huber(error: float, delta: float) -> float:
    size = abs(error)
    return size**2 / 2 if size <= delta else delta * (size - delta / 2)


def test_the_rpn_s_loss():
    rpn = tpu.TPURPN(
        in_features=["p2", "p3"],
        head=nn.Identity(),
        anchor_generator=DefaultAnchorGenerator(
            sizes=[[16], [32]], aspect_ratios=[1.0], strides=[8, 16], offset=0.5
        ),
        anchor_matcher=Matcher([0.3, 0.7], [0, -1, 1], allow_low_quality_matches=True),
        box2box_transform=Box2BoxTransform(weights=(1.0, 1.0, 1.0, 1.0)),
        batch_size_per_image=2,  # so that there are more objects than samples
        positive_fraction=0.5,
        pre_nms_topk=(9, 9),
        post_nms_topk=(9, 9),
        smooth_l1_beta=1 / 9,
    )
    anchors = rpn.anchor_generator([torch.zeros(1, 1, 6, 6), torch.zeros(1, 1, 3, 3)])
    objects = [
        # The first is an anchor: its targets are 0 and are not counted
        [[0.0, 0, 16, 16], [17, 22, 33, 40], [10, 11, 43, 41]],
        [[6.0, 8, 22, 30]],
    ]
    instances = [Instances((48, 48), gt_boxes=Boxes(torch.tensor(o))) for o in objects]
    labels, boxes = rpn.label_and_sample_anchors(anchors, instances)
    deltas = [0.3 * torch.randn(2, len(a), 4) for a in anchors]
    logits = [torch.randn(2, len(a)) for a in anchors]
    with EventStorage():
        found = rpn.losses(anchors, logits, labels, deltas, boxes)
    unsampled, total, start = 0, 0.0, 0
    for level, own in enumerate(anchors):
        errors = []
        for image in range(2):
            places = slice(start, start + len(own))
            targets = rpn.box2box_transform.get_deltas(own.tensor, boxes[image][places])
            for label, given, wanted in zip(
                labels[image][places], deltas[level][image], targets, strict=True
            ):
                unsampled += int(label == 2)
                pairs = zip(given.tolist(), wanted.tolist(), strict=True)
                errors += [huber(g - w, 1 / 9) for g, w in pairs if label > 0 and w]
        total += sum(errors) / max(len(errors), 1)
        start += len(own)
    assert unsampled and found["loss_rpn_loc"].item() == pytest.approx(float(total), abs=1e-12)
    flat, every = torch.cat(logits, 1), torch.stack(labels)
    sampled = (every == 0) | (every == 1)
    cross = F.binary_cross_entropy_with_logits(
        flat[sampled], every[sampled].to(flat), reduction="sum"
    )
    assert found["loss_rpn_cls"].item() == pytest.approx(float(cross) / 4, abs=1e-6)
    nothing = [torch.zeros_like(x) for x in labels]
    with EventStorage():
        assert rpn.losses(anchors, logits, nothing, deltas, boxes)["loss_rpn_loc"] == 0


def test_the_box_head_s_loss():
    layers = tpu.TPUOutputLayers(
        ShapeSpec(channels=4),
        box2box_transform=Box2BoxTransform(weights=(10.0, 10.0, 5.0, 5.0)),
        num_classes=3,
        smooth_l1_beta=1.0,
    )
    proposals = torch.tensor([[0.0, 0, 10, 10], [5, 5, 20, 30], [1, 2, 8, 9]])
    objects = proposals + torch.tensor([[1.0, 2, 3, 4], [0, 0, 0, 0], [2, 1, 3, 9]])
    classes = torch.tensor([2, 3, 0])  # 3 is background
    deltas = torch.randn(3, 12)
    wanted = layers.box2box_transform.get_deltas(proposals, objects)
    errors = [
        huber(float(deltas[i, 4 * classes[i] + j] - wanted[i, j]), 1)
        for i in (0, 2)
        for j in range(4)
    ]
    found = layers.box_reg_loss(proposals, objects, deltas, classes)
    assert found.item() == pytest.approx(sum(errors) / 8, abs=1e-12)
    assert layers.box_reg_loss(proposals, objects, deltas, torch.full((3,), 3)) == 0


def test_the_heads_have_norms_after_every_layer():
    shape, x = ShapeSpec(channels=4, height=3, width=3), torch.randn(5, 4, 3, 3)
    box = tpu.TPUBoxHead(shape, conv_dims=[6], fc_dims=[7, 8], conv_norm="BN")
    y = normed(F.conv2d(x, box.conv1.weight, padding=1)).relu().flatten(1)
    for fc in (box.fc1[0], box.fc2[0]):
        y = normed(y @ fc.weight.T).relu()
    torch.testing.assert_close(box(x), y)
    mask = tpu.TPUMaskHead(shape, num_classes=2, conv_dims=[6, 6], conv_norm="BN")
    y = normed(F.conv2d(x, mask.mask_fcn1.weight, padding=1)).relu()
    y = normed(F.conv_transpose2d(y, mask.deconv[0].weight, stride=2)).relu()
    torch.testing.assert_close(mask.layers(x), mask.predictor(y))


def test_regions_are_read_at_one_point_for_each_output_and_large_ones_from_p6():
    task = tasks()[0]
    options = task.config.MODEL.ROI_BOX_HEAD
    scales = [2.0**-level for level in range(2, 7)]
    pooler = ROIPooler(7, scales, options.POOLER_SAMPLING_RATIO, options.POOLER_TYPE)
    # A map of its row times 100 and its column, with the level's number
    maps = []
    for level in range(2, 7):
        places = torch.arange(1024.0 / 2**level)
        maps.append((100 * places[:, None] + places + 1e6 * level)[None, None])
    boxes = torch.tensor([[30.0, 50, 120, 170], [10, 20, 930, 960]])
    for found, box, level in zip(pooler(maps, [Boxes(boxes)]), boxes, (2, 6), strict=True):
        x0, y0, x1, y1 = box / 2**level
        steps = (torch.arange(7) + 0.5) / 7
        wanted = 100 * (y0 + steps * (y1 - y0))[:, None] + x0 + steps * (x1 - x0) + 1e6 * level
        torch.testing.assert_close(found[0], wanted)


@pytest.mark.slow
def test_the_configurations():
    torch.set_default_dtype(torch.float32)
    yaml, lazy = tasks()
    models = [on_meta(task.config) for task in (yaml, lazy)]
    shapes, other = ({n: p.shape for n, p in m.state_dict().items()} for m in models)
    assert shapes == other
    for model in models:
        norms = [m for m in model.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        assert {(norm.momentum, norm.eps) for norm in norms} == {(0.003, 1e-4)}
        rpn, roi = model.proposal_generator, model.roi_heads
        assert rpn.smooth_l1_beta == pytest.approx(1 / 9) and roi.box_predictor.smooth_l1_beta == 1
        assert rpn.anchor_generator.offset == 0.5 and roi.box_in_features == LEVELS
        assert [len(p.level_poolers) for p in (roi.box_pooler, roi.mask_pooler)] == [5, 5]
        assert {p.sampling_ratio for p in roi.box_pooler.level_poolers} == {1}
        assert not roi.mask_pooler.level_poolers[0].aligned
    # A schedule of a LazyConfig is a node
    without = {"lr_steps": (), "warmup_iters": 0}
    assert dataclasses.replace(yaml.settings, **without) == lazy.settings
    for task, model in zip((yaml, lazy), models, strict=True):
        decayed = {
            id(p): group["weight_decay"]
            for group in task.build_optimizer(model).param_groups
            for p in group["params"]
        }
        for name, parameter in model.named_parameters():
            kernel = parameter.dim() > 1
            assert decayed[id(parameter)] == (4e-5 if kernel else 0), name
    # TPU's table prints 48 M for ResNet-50, which one linear layer would not give
    cfg = yaml.config.clone()
    cfg.MODEL.LAMBDA_RESNET.NAME = "resnet50"
    counts = []
    for cfg.MODEL.ROI_BOX_HEAD.NUM_FC in (2, 1):
        counts.append(round(sum(p.numel() for p in on_meta(cfg).parameters()) / 1e6))
    assert counts == [48, 47]


@pytest.mark.slow
def test_both_train_and_evaluate_the_same(tmp_path):
    torch.set_default_dtype(torch.float32)
    make_shapes(tmp_path, num_train=4, num_val=1, size=64)
    register_shapes(tmp_path)
    weights = []
    for kind, (parse, ending) in enumerate([(parser, "yaml"), (lazy_parser, "py")]):
        folder = tmp_path / ending
        more = (
            f"SOLVER.MAX_ITER 1 SOLVER.IMS_PER_BATCH 2 SOLVER.STEPS () SOLVER.BASE_LR 0.01 "
            f"SOLVER.WARMUP_ITERS 0 SOLVER.REFERENCE_WORLD_SIZE 0 OUTPUT_DIR {folder} "
            "MODEL.ROI_HEADS.NUM_CLASSES 3 DATASETS.TRAIN ('shapes_train',) "
            "DATASETS.TEST ('shapes_val',)",
            f"train.max_iter=1 dataloader.train.total_batch_size=2 optimizer.lr=0.01 "
            f"lr_multiplier.warmup_length=0 train.reference_world_size=0 train.output_dir={folder} "
            "model.roi_heads.num_classes=3 dataloader.train.dataset.names=shapes_train "
            "dataloader.test.dataset.names=shapes_val",
        )[kind]
        words = f"{TINY[kind]} {TWO[kind]} {more}".split()
        run(parse().parse_args(["--config-file", f"{CONFIG}.{ending}", *words]))
        assert (folder / "inference/coco_instances_results.json").exists()
        weights.append(torch.load(folder / "model_final.pth", weights_only=False)["model"])
    assert weights[0].keys() == weights[1].keys()
    assert all(torch.equal(value, weights[1][name]) for name, value in weights[0].items())
