"""A LazyConfig of a RetinaNet that takes its backbone from the registry."""

from pathlib import Path

import detectron2
from detectron2.config import LazyCall as L
from detectron2.config import LazyConfig
from detectron2.layers import ShapeSpec
from detectron2.modeling import BACKBONE_REGISTRY


def lambda_backbone():
    # By its name alone, and with the keys in the defaults
    from detectron2.config import get_cfg

    cfg = get_cfg()
    cfg.MODEL.LAMBDA_RESNET.NAME = "lambda_resnet26_slim"
    cfg.MODEL.LAMBDA_RESNET.SCOPE = 7
    cfg.MODEL.LAMBDA_RESNET.OUT_FEATURES = ["res4"]
    cfg.MODEL.BACKBONE.FREEZE_AT = 0
    return BACKBONE_REGISTRY.get("build_lambda_resnet_backbone")(cfg, None)


nodes = Path(detectron2.__file__).parent / "model_zoo" / "configs" / "common"
model = LazyConfig.load(str(nodes / "models" / "retinanet.py")).model
dataloader = LazyConfig.load(str(nodes / "data" / "coco.py")).dataloader
train = LazyConfig.load(str(nodes / "train.py")).train
optimizer = LazyConfig.load(str(nodes / "optim.py")).SGD
lr_multiplier = LazyConfig.load(str(nodes / "coco_schedule.py")).lr_multiplier_1x

model.backbone = L(lambda_backbone)()
model.head_in_features = ["res4"]
model.head.input_shape = [ShapeSpec(channels=256)]
model.head.conv_dims = [16]
model.anchor_generator.sizes = [[16, 24, 32]]
model.anchor_generator.strides = [16]
model.num_classes = 3
dataloader.train.dataset.names = "shapes_train"
dataloader.train.mapper.use_instance_mask = False
dataloader.train.mapper.augmentations = []
dataloader.train.total_batch_size = 2
dataloader.train.num_workers = 0
train.device = "cpu"
train.max_iter = 2
