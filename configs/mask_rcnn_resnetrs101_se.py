# Table 14: 48.5 box AP, 42.8 mask AP.
from .common.mask_rcnn import dataloader, lr_multiplier, model, optimizer, train

model.backbone.bottom_up.name = "resnet_rs101_se"
train.output_dir = "./output/mask_rcnn_resnetrs101_se"
