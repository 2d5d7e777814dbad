"""A LazyConfig of a region proposal network that takes its backbone from the registry."""

from detectron2.config import LazyCall as L
from detectron2.data import (
    DatasetMapper,
    build_detection_train_loader,
    get_detection_dataset_dicts,
)
from detectron2.data.transforms import RandomFlip
from detectron2.modeling import BACKBONE_REGISTRY
from detectron2.modeling.anchor_generator import DefaultAnchorGenerator
from detectron2.modeling.box_regression import Box2BoxTransform
from detectron2.modeling.matcher import Matcher
from detectron2.modeling.meta_arch import ProposalNetwork
from detectron2.modeling.proposal_generator import RPN, StandardRPNHead
from detectron2.solver import WarmupParamScheduler
from detectron2.solver.build import get_default_optimizer_params
from fvcore.common.param_scheduler import CosineParamScheduler
from torch.optim import SGD


def lambda_backbone():
    # By its name alone, and with the keys in the defaults
    from detectron2.config import get_cfg

    cfg = get_cfg()
    cfg.MODEL.LAMBDA_RESNET.NAME = "lambda_resnet26_slim"
    cfg.MODEL.LAMBDA_RESNET.SCOPE = 7
    cfg.MODEL.LAMBDA_RESNET.OUT_FEATURES = ["res4"]
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    return BACKBONE_REGISTRY.get("build_lambda_resnet_backbone")(cfg, None)


model = L(ProposalNetwork)(
    backbone=L(lambda_backbone)(),
    proposal_generator=L(RPN)(
        in_features=["res4"],
        head=L(StandardRPNHead)(in_channels=256, num_anchors=3, conv_dims=[16]),
        anchor_generator=L(DefaultAnchorGenerator)(
            sizes=[[32]], aspect_ratios=[0.5, 1.0, 2.0], strides=[16]
        ),
        anchor_matcher=L(Matcher)(
            thresholds=[0.3, 0.7], labels=[0, -1, 1], allow_low_quality_matches=True
        ),
        box2box_transform=L(Box2BoxTransform)(weights=[1.0, 1.0, 1.0, 1.0]),
        batch_size_per_image=32,
        positive_fraction=0.5,
        pre_nms_topk=(50, 20),
        post_nms_topk=(20, 10),
    ),
    pixel_mean=[127.0, 127.0, 127.0],
    pixel_std=[60.0, 60.0, 60.0],
)
dataloader = {
    "train": L(build_detection_train_loader)(
        dataset=L(get_detection_dataset_dicts)(names="shapes_train"),
        mapper=L(DatasetMapper)(is_train=True, augmentations=[L(RandomFlip)()], image_format="BGR"),
        total_batch_size=2,
        num_workers=0,
    )
}
optimizer = L(SGD)(params=L(get_default_optimizer_params)(), lr=0.01)
lr_multiplier = L(WarmupParamScheduler)(
    scheduler=L(CosineParamScheduler)(start_value=1.0, end_value=0.0),
    warmup_length=0.5,
    warmup_factor=0.1,
)
train = {
    "output_dir": "output",
    "init_checkpoint": "",
    "max_iter": 2,
    "device": "cpu",
    "amp": {"enabled": False},
    "ddp": {},
    "checkpointer": {"period": 100, "max_to_keep": 1},
    "eval_period": 0,
    "log_period": 1,
}
