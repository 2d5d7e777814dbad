# Table 14: 49.4 box AP, 43.5 mask AP.
from .common.mask_rcnn import dataloader, lr_multiplier, model, optimizer, train

model.backbone.bottom_up.name = "resnet_rs152_se"
train.output_dir = "./output/mask_rcnn_resnetrs152_se"
