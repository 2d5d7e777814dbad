# Table 14: 48.9 box AP, 43.2 mask AP.
from .common.mask_rcnn import dataloader, lr_multiplier, model, optimizer, train

model.backbone.bottom_up.name = "resnet_rs152"
train.output_dir = "./output/mask_rcnn_resnetrs152"
