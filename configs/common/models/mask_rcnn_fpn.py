"""Mask R-CNN for the paper's training: from scratch, with synchronised norms. FPN is our choice.

Everything that is not set here is Detectron2's. configs/base_mask_rcnn_fpn.yaml is the same model,
and marks what the paper more plausibly ran.
"""

from lambda_det import detectron2_config

from ..backbone import lambda_resnet

model = detectron2_config("common/models/mask_rcnn_fpn.py").model

# Mean and standard deviation of ImageNet's pixels, blue first. Detectron2's default standard
# deviation is 1, which suits its pretrained weights. Weights from scratch need unit variance.
model.pixel_mean = [103.530, 116.280, 123.675]
model.pixel_std = [57.375, 57.120, 58.395]

model.backbone.bottom_up = lambda_resnet
model.backbone.norm = "SyncBN"

model.proposal_generator.head.conv_dims = [-1, -1]

model.roi_heads.box_head.conv_dims = [256, 256, 256, 256]
model.roi_heads.box_head.fc_dims = [1024]
# A synchronised norm that accepts an empty batch, as from images without a box. The trainer
# replaces it with a float32 one.
model.roi_heads.box_head.conv_norm = "naiveSyncBN_N"
model.roi_heads.mask_head.conv_norm = "naiveSyncBN_N"
