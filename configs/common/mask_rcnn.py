"""The paper's training of Mask R-CNN (Appendix E.2), whole: a file adds the network's name."""

from .data.coco_jitter import dataloader
from .models.mask_rcnn_fpn import model
from .optim import SGD as optimizer
from .schedule import lr_multiplier
from .train import train
