"""The loop over the steps of a training, and the model that takes part in it."""

from __future__ import annotations

import contextlib
import logging
import os
import signal

import torch
from detectron2.engine import SimpleTrainer, TrainerBase
from detectron2.utils import comm
from detectron2.utils.events import EventStorage
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from lambda_det.distributed.launch import on_main_process
from lambda_det.distributed.signals import StopRequest, catch_signals
from lambda_det.errors import Preempted, UserError, WeightsError
from lambda_det.training.checkpoint_files import last_checkpoint, newest_good
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.training.disk_errors import disk_errors_in_words
from lambda_det.training.hooks import RunWriter

__all__ = ["checkpoint_name", "checkpoint_to_resume", "distribute", "last_saved", "run_steps"]

logger = logging.getLogger(__name__)


def run_steps(trainer: TrainerBase) -> None:
    """Run the steps from ``trainer.start_iter`` to ``trainer.max_iter``, with its hooks.

    A hook may lower ``max_iter`` to end early. Not TrainerBase.train: after an error that would
    print its stack trace a second time, and run the final evaluation if it happened in the last
    step.

    Args:
        trainer: with ``checkpointer``, ``save_checkpoint`` and ``stop_signal``.

    Raises:
        Preempted: a scheduler's signal ended the run; what it did is saved.
        UserError: a checkpoint could not be written.
    """
    trainer.iter = trainer.start_iter
    folder = trainer.checkpointer.save_dir
    with (
        catch_signals(),
        disk_errors_in_words(folder),
        EventStorage(trainer.start_iter) as trainer.storage,
    ):
        trainer.checkpointer.warn_of_little_space()
        try:
            trainer.before_train()
            while trainer.iter < trainer.max_iter:
                trainer.before_step()
                trainer.run_step()
                trainer.after_step()
                trainer.checkpointer.check()
                if trainer.stop_signal and trainer.iter + 1 < trainer.max_iter:
                    logger.info("Told to stop: saving a checkpoint")
                    trainer.save_checkpoint(checkpoint_name(trainer.iter))
                    raise StopRequest(trainer.stop_signal)
                trainer.iter += 1
            trainer.iter = trainer.max_iter
            trainer.after_train()
        except StopRequest as request:
            trainer.checkpointer.wait()
            _record(trainer)
            raise Preempted(_last_words(request.signal, trainer.iter + 1, folder)) from request
        except BaseException:
            last_saved(trainer.checkpointer)  # a good one is not lost over another's error
            _record(trainer)
            raise
        finally:
            _end_loader(getattr(trainer, "_trainer", trainer))
        trainer.checkpointer.wait()


def checkpoint_name(iteration: int) -> str:
    """Of the checkpoint after that iteration, counted from 0, without its ending."""
    return f"model_{iteration:07d}"


def last_saved(checkpointer: SafeCheckpointer) -> str:
    """The last good checkpoint of a run, for the report of an error; "" where there is none.

    One that is being written is waited for. If it fails, that is only logged.
    """
    try:
        checkpointer.wait()
    except UserError as error:
        logger.error(str(error))
    return last_checkpoint(checkpointer.save_dir)


def checkpoint_to_resume(folder: str) -> str:
    """The newest whole checkpoint of a run folder, the same on all processes; "" where is none.

    Raises:
        WeightsError: there are checkpoints and none is whole, or not every process sees the file.
    """
    found: list[str] = []
    on_main_process(lambda: found.append(newest_good(folder)))
    path = comm.all_gather(found)[0][0]
    if path and not all(comm.all_gather(os.path.isfile(path))):
        raise WeightsError(
            f"Not every process finds the checkpoint {path}; give all machines the same folder."
        )
    return path


def _end_loader(trainer: SimpleTrainer) -> None:
    """End the processes that load images now; those of a loader that is garbage take 20 seconds."""
    batches = getattr(trainer, "_data_loader_iter_obj", None)
    if hasattr(batches, "close"):  # not that of another project's loader
        batches.close()
        trainer._data_loader_iter_obj = None


def _record(trainer: TrainerBase) -> None:
    """What led to the end should be on record, if the disk takes it."""
    for hook in trainer._hooks:
        if isinstance(hook, RunWriter):
            with contextlib.suppress(OSError):
                hook.after_train()


def _last_words(number: int, steps: int, folder: str) -> str:
    return (
        f"Stopped by {signal.Signals(number).name} after step {steps}; {last_checkpoint(folder)} "
        "holds all of it: the same command with --resume continues."
    )


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
