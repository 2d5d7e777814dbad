"""The paper's Mask R-CNN training (Appendix F.3). A configuration adds the name of the network."""

from .data.coco_jitter import dataloader
from .models.mask_rcnn_fpn import model
from .optim import SGD as optimizer
from .schedule import lr_multiplier
from .train import train
