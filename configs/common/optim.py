"""The paper's rate and decay for detection (Appendix F.3 of the conference version).

The paper does not name the optimiser: SGD and its momentum are ours.
"""

import torch
from detectron2.config import LazyCall as L
from detectron2.solver.build import get_default_optimizer_params

SGD = L(torch.optim.SGD)(
    params=L(get_default_optimizer_params)(weight_decay_norm=0.0),  # the trainer sets .model
    lr=0.32,
    momentum=0.9,
    weight_decay=4e-5,
    foreach=True,
)
