"""The loop over the steps of a training, and the model that takes part in it."""

from __future__ import annotations

import torch
from detectron2.engine import TrainerBase
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lambda_det.engine.hooks import RunWriter

__all__ = ["distribute", "run_steps"]


def run_steps(trainer: TrainerBase) -> None:
    """Run the steps from ``trainer.start_iter`` to ``trainer.max_iter``, with its hooks.

    A hook may lower ``max_iter`` to end early. Not TrainerBase.train: after an error that would
    print its stack trace a second time, and run the final evaluation if it happened in the last
    step.
    """
    trainer.iter = trainer.start_iter
    with EventStorage(trainer.start_iter) as trainer.storage:
        trainer.before_train()
        try:
            while trainer.iter < trainer.max_iter:
                trainer.before_step()
                trainer.run_step()
                trainer.after_step()
                trainer.iter += 1
        except BaseException:
            for hook in trainer._hooks:
                if isinstance(hook, RunWriter):
                    hook.after_train()  # what led to the error should be on record
            raise
        trainer.iter = trainer.max_iter
        trainer.after_train()


def distribute(
    model: nn.Module,
    device: str,
    *,
    find_unused_parameters: bool = False,
    fp16_compression: bool = False,
) -> nn.Module:
    """The model, taking the mean of the gradients over all processes where there are several.

    Args:
        model: on its device.
        device: of the model.
        find_unused_parameters: for a model some of whose parameters take no part in some steps.
        fp16_compression: send the gradients as float16.
    """
    if comm.get_world_size() == 1:
        return model
    device_ids = [torch.cuda.current_device()] if torch.device(device).type == "cuda" else None
    # Synchronised norms have the same running statistics on every process; others' are the first
    # process's where they are saved, or taken afresh over all of them before they are used
    distributed = DistributedDataParallel(
        model,
        device_ids=device_ids,
        broadcast_buffers=False,
        find_unused_parameters=find_unused_parameters,
    )
    if fp16_compression:
        distributed.register_comm_hook(None, fp16_compress_hook)
    return distributed
