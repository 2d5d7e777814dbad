# Table 14: 50.0 box AP, 43.9 mask AP.
from .common.mask_rcnn import dataloader, lr_multiplier, model, optimizer, train

model.backbone.bottom_up.name = "lambda_resnet152"
train.output_dir = "./output/mask_rcnn_lambdaresnet152"
