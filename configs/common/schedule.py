"""The paper's schedule for detection (Appendix F.3): 130k steps, decay at 90, 95 and 97.5 %."""

from detectron2.config import LazyCall as L
from detectron2.solver import WarmupParamScheduler
from fvcore.common.param_scheduler import MultiStepParamScheduler

# Positions are shares of the training, so another train.max_iter stretches or shrinks the schedule.
lr_multiplier = L(WarmupParamScheduler)(
    scheduler=L(MultiStepParamScheduler)(
        values=[0.1**k for k in range(4)],
        milestones=[117000, 123500, 126750],
        num_updates=130000,
    ),
    warmup_length=1000 / 130000,
    warmup_factor=0.0,
    warmup_method="linear",
)
