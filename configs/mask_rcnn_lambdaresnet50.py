# Not in the paper, whose smallest detector has 101 layers.
from .common.mask_rcnn import dataloader, lr_multiplier, model, optimizer, train

model.backbone.bottom_up.name = "lambda_resnet50"
train.output_dir = "./output/mask_rcnn_lambdaresnet50"
