"""Small networks of weights that make every part count, and that detect something."""

from pathlib import Path

import pytest
import torch
from detectron2.config import CfgNode
from torch import nn

from lambda_det.detection.task import DetectionTask
from lambda_det.export import detections
from tests.training.tiny_detector import tiny_config

# A fresh detector's scores are all alike; norms at the end of a block start at 0
OPTIONS = """\
MODEL:
  PIXEL_STD: [1.0, 1.0, 1.0]
  BACKBONE: {NAME: build_lambda_resnet_fpn_backbone}
  LAMBDA_RESNET: {NAME: resnet14_slim_lambda_c5, SCOPE: 7}
  FPN: {IN_FEATURES: [res4, res5]}
  ANCHOR_GENERATOR: {SIZES: [[16], [32]]}
  RPN: {IN_FEATURES: [p4, p5], PRE_NMS_TOPK_TEST: 30, POST_NMS_TOPK_TEST: 20}
  ROI_HEADS: {IN_FEATURES: [p4, p5], SCORE_THRESH_TEST: 0.3}
"""


@torch.no_grad()
def scramble(network: nn.Module) -> nn.Module:
    """Give norms and predictors values that nothing has at the start."""
    generator = torch.Generator().manual_seed(0)
    for name, module in network.named_modules():
        if getattr(module, "running_var", None) is not None:
            for tensor, low, high in (
                (module.running_var, 0.5, 2),
                (module.running_mean, -0.5, 0.5),
                (module.weight, 0.5, 1),
                (module.bias, -0.5, 0.5),
            ):
                if tensor is not None:
                    tensor.uniform_(low, high, generator=generator)
        if name.rpartition(".")[2] in ("cls_score", "objectness_logits"):
            module.weight.normal_(std=0.1, generator=generator)
    return network.eval()


def lambda_detector_config() -> CfgNode:
    cfg = tiny_config()
    cfg.merge_from_other_cfg(CfgNode.load_cfg(OPTIONS))
    return cfg


def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a graph have fewer rounds of its NMS, which are all alike and a third of its nodes."""
    monkeypatch.setattr(detections, "ROUNDS", 6)


def save_lambda_run(folder: Path, cfg: CfgNode | None = None) -> Path:
    """Write a folder as a run of this detector, or of another configuration, leaves it."""
    cfg, file = cfg or lambda_detector_config(), folder / "model_final.pth"
    folder.mkdir()
    (folder / "config.yaml").write_text(cfg.dump())
    torch.manual_seed(0)
    model = scramble(DetectionTask(cfg).build_model())
    torch.save({"model": model.state_dict()}, file)
    (folder / "last_checkpoint").write_text(file.name)
    return folder
