# Table 14: 48.2 box AP, 42.6 mask AP.
from .common.mask_rcnn import dataloader, lr_multiplier, model, optimizer, train

model.backbone.bottom_up.name = "resnet_rs101"
train.output_dir = "./output/mask_rcnn_resnetrs101"
