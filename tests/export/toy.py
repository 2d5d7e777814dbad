"""A detector with FPN of a few tensors, and the checkpoint of a small classifier."""

import torch
from detectron2.layers import Conv2d, ShapeSpec, get_norm
from detectron2.modeling import FPN, Backbone
from torch import nn

import lambda_det

# What a checkpoint of a detector records of its backbone
RUN = {"model": "lambda_resnet26_slim", "options": {"norm": "BN", "scope": 3}}
MEAN, STD = [123.675, 116.28, 103.53], [58.395, 57.12, 57.375]


def _conv(channels: int, norm: str) -> Conv2d:
    return Conv2d(channels, 4, 3, padding=1, bias=False, norm=get_norm(norm, 4))


class Network(Backbone):
    """A backbone with the names of Detectron2's."""

    def __init__(self, norm: str = "BN", blocks: int = 1) -> None:
        super().__init__()
        self.stem = nn.ModuleDict({"conv1": _conv(3, norm)})
        self.res2 = nn.Sequential(
            *(nn.ModuleDict({"conv1": _conv(4, norm)}) for _ in range(blocks))
        )
        scramble(self)

    def forward(self, x):
        raise NotImplementedError

    def output_shape(self):
        return {"res2": ShapeSpec(channels=4, stride=4)}


class Detector(nn.Module):
    def __init__(self, norm: str = "BN", blocks: int = 1, classes: int = 2) -> None:
        super().__init__()
        self.backbone = FPN(Network(norm, blocks), ["res2"], 4)
        self.roi_heads = nn.ModuleDict(
            {"box_predictor": nn.ModuleDict({"cls_score": nn.Linear(4, classes + 1)})}
        )
        self.register_buffer("pixel_mean", torch.zeros(3))


class Model(nn.Module):
    """A classifier."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.backbone = Network()
        self.backbone.linear = nn.Linear(4, classes)


@torch.no_grad()
def scramble(model: nn.Module) -> nn.Module:
    """Give each parameter and running statistic values that nothing has at the start."""
    for name, tensor in model.state_dict().items():
        if name.endswith("running_var") or name.endswith("norm.weight"):
            tensor.uniform_(0.5, 2.0)
        elif tensor.is_floating_point() and tensor.ndim == 1:
            tensor.normal_()
    return model


def classifier_checkpoint(
    name: str = "lambda_resnet26_slim", *, ema: bool = True, mean=MEAN, norm: str = "BN", **options
) -> dict:
    """Random weights in the format of the trainer; those of the average are others."""
    options = {"norm": norm, **options}

    def state():
        return scramble(lambda_det.create_classifier(name, 3, **options)).state_dict()

    average = {"ema": {"model": state(), "updates": 7}} if ema else {}
    return {
        "model": state(),
        **average,
        "trainer": {"iteration": 4},
        "iteration": 4,
        "precise_statistics": ["ema", "raw"],
        "recipe": {
            "model": name,
            "options": options,
            "num_classes": 3,
            "classes": ["a", "b", "c"],
            "input_format": "RGB",
            "pixel_mean": list(mean),
            "pixel_std": STD,
            "image_size": 64,
            "config": "SEED: 3\n",
        },
        "results": {
            "held_out": {"raw": {"top1": 1.0, "top5": 5.0}, "ema": {"top1": 2.0, "top5": 6.0}}
        },
    }


def in_fpn(state: dict) -> dict:
    """The tensors of a classifier's backbone as a detector with FPN calls them, beside others."""
    names = {
        name.replace("backbone.", "backbone.bottom_up."): tensor
        for name, tensor in state.items()
        if "linear" not in name
    }
    return {**names, "backbone.fpn_lateral2.weight": torch.ones(1), "pixel_mean": torch.ones(3)}


def in_c4(state: dict) -> dict:
    """Likewise as a detector calls them that has the last stage in its heads."""
    names = {
        name.replace("backbone.res5.", "roi_heads.res5."): tensor
        for name, tensor in state.items()
        if "linear" not in name
    }
    return {**names, "roi_heads.box_predictor.cls_score.weight": torch.ones(1)}
