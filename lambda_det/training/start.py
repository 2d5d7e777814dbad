"""The start of a run: first everything is checked, with nothing written; then come folder and work.

Each process gets the Task of a command line, and fits it to data and processes. The task builds the
model. The checkpoint is read and verified once, and loaded into it. What cannot work is refused up
to here. Then the folder of the run is made, log and configuration are written to it, and training
begins.
"""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from detectron2.utils import comm
from detectron2.utils.env import seed_all_rng

from lambda_det.config import FIXED, SAMPLES, leaves, on_resume, read_plain
from lambda_det.distributed.connection import on_all, on_main_process
from lambda_det.errors import ConfigError, WeightsError
from lambda_det.files import refuse_unwritable
from lambda_det.native.calls import copied
from lambda_det.process import keep_memory
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.training.hooks import Progress, writers_of
from lambda_det.training.library_errors import explained
from lambda_det.training.log import ONLY_IN_FILE, BufferedLog
from lambda_det.training.precision import AUTO, Precision
from lambda_det.training.run_folder import Change, Checkpoint, RunFolder, RunLock
from lambda_det.training.settings import Settings
from lambda_det.training.task import EMA, RAW, Results, Task
from lambda_det.training.trainer import Trainer
from lambda_det.version import __version__
from lambda_det.weights.formats import read_checkpoint
from lambda_det.weights.loading import read_weights

logger = logging.getLogger(__name__)


def work(
    args: argparse.Namespace,
    task: Task,
    config_file: str | None = None,
    messages: Sequence[logging.LogRecord] = (),
) -> None:
    """Train or evaluate a task as a command line says, in one of its processes.

    Args:
        args: the flags of :func:`lambda_det.training.command_line.run_parser`.
        task: of the configuration, not prepared.
        config_file: that the configuration was read from, for the run's config.yaml.
        messages: of :meth:`BufferedLog.take`, with which the log of the first process begins.

    Raises:
        UserError: one sentence to print.
    """
    with BufferedLog(
        quiet=args.progress and not args.eval_only,
        earlier=messages if comm.is_main_process() else (),
    ) as log:
        task = task.prepare(train=not args.eval_only)
        settings = task.settings
        precision = Precision.of(settings)
        if precision.is_emulated():
            logger.warning(
                f"This device has no instructions for {precision}, which takes many times as long "
                f"as float32 here; {settings.option('amp_dtype', AUTO)} trains in float32 here"
            )
        if precision.device == "cpu":
            keep_memory()
        logger.info(f"Command line: {shlex.join(sys.argv)}", extra=ONLY_IN_FILE)
        logger.info(
            f"Process {comm.get_rank()} of {comm.get_world_size()}: lambda_det {__version__}, "
            f"PyTorch {torch.__version__}, {settings.device}, training in {precision}"
        )
        # a different seed on each process; the batches of a step have their own seeds
        seed_all_rng(None if settings.seed < 0 else settings.seed + comm.get_rank())
        torch.backends.cudnn.benchmark = settings.cudnn_benchmark and not args.eval_only
        if settings.float32_precision:
            torch.set_float32_matmul_precision(settings.float32_precision)
            torch.backends.cudnn.allow_tf32 = settings.float32_precision != "highest"
        with explained(settings, lambda: leaves(read_plain(task.dump()))):
            if args.eval_only:
                evaluate(task, log, resume=args.resume, config_file=config_file)
            else:
                train(
                    task,
                    log,
                    resume=args.resume,
                    config_file=config_file,
                    debug_numerics=args.debug_numerics,
                    progress=args.progress,
                )
        logger.info(RunFolder(settings.output_dir).describe())


def train(
    task: Task,
    log: BufferedLog,
    *,
    resume: bool,
    config_file: str | None = None,
    debug_numerics: bool = False,
    progress: bool = False,
) -> Results:
    """Train and evaluate; with ``resume`` from the last checkpoint, if there is one.

    Call it in every process.

    Args:
        task: what to train.
        log: is opened when the folder is there.
        resume: continue the run in the folder.
        config_file: that the configuration was read from, for the run's config.yaml.
        debug_numerics: stop at the first layer whose output or gradient is not finite.
        progress: show a bar over the steps.

    Raises:
        UserError: something cannot work, before anything is written; or see :meth:`Trainer.train`.
    """
    folder = task.settings.output_dir
    with RunLock(folder) as lock:
        on_main_process(lock.acquire)
        changes = on_main_process(lambda: check_run_folder(task, resume=resume)) or []
        on_main_process(lambda: writers_of(task.settings))
        checkpoint = _read_newest_on_all(folder) if resume else None
        if resume and checkpoint is None:
            logger.info(f"--resume: {folder} holds no checkpoint, so this starts")
        trainer = Trainer(task, checkpoint, debug_numerics=debug_numerics)
        if progress and comm.is_main_process():
            trainer.register_hooks([Progress()])

        _open_folder(task, log, lock)
        if trainer.start_iter < trainer.max_iter or trainer.evaluation.is_pending:
            _log_changes(task, changes)
            if comm.is_main_process():
                RunFolder(folder).save_config(task.dump(), config_file)
        else:
            logger.info(
                f"The run is over after {trainer.start_iter} steps: nothing is trained, and its "
                "configuration stays; a longer training continues it "
                f"({task.settings.key('max_iter')}, or --epochs of own data), and so does "
                f"{task.settings.key('patience')} where it stopped early"
            )
        del checkpoint  # its tensors need not stay in memory
        return trainer.train()


def evaluate(
    task: Task, log: BufferedLog, *, resume: bool, config_file: str | None = None
) -> Results:
    """Evaluate the weights that are named, or with ``resume`` the run's last checkpoint.

    Raises:
        ConfigError: no weights are named.
        WeightsError: they are missing or do not hold the whole model.
    """
    settings = task.settings
    path, content = _weights_to_evaluate(task, resume)
    on_main_process(lambda: check_evaluation_folder(task, path))
    task.check_weights(content, path)
    model = task.build_model()
    SafeCheckpointer(task.network(model)).load(path, content=content)
    models = {RAW: model}
    if "ema" in content:
        models[EMA] = copied(model)
        task.network(models[EMA]).load_state_dict(content["ema"]["model"])
    on_main_process(lambda: task.check_data(train=False))

    _open_folder(task, log)
    folder = RunFolder(settings.output_dir)
    if comm.is_main_process() and not folder.config_file.exists():  # that of a run is kept
        folder.save_config(task.dump(), config_file)
    results = task.evaluate(models, final=True)
    if comm.is_main_process():
        logger.info(f"{path}: {task.describe(results)}")
        task.finish(results)
    return results


def check_run_folder(task: Task, *, resume: bool) -> list[Change]:
    """Refuse to train in the folder of another run; write nothing.

    Args:
        task: gives the folder, and its configuration as it would be saved there.
        resume: continue the run in the folder; a folder without a run is also accepted.

    Returns:
        What has changed in the configuration since the run was started.

    Raises:
        ConfigError: the folder cannot be written to, holds a run and ``resume`` is not set, or
            holds a run of another configuration.
    """
    run = _writable_folder(task.settings)
    if not resume:
        run.refuse_other_run()
    if not run.holds_run:
        return []
    changes = list(run.changed_keys(task.dump()))
    for changed, before, now in changes:
        if on_resume(task.on_resume, changed) == FIXED:
            raise ConfigError(
                f"--resume continues the run in {run.path}, which has {changed} {before!r}; now it "
                f"is {now!r}. Set it back, or give another --output."
            )
    return changes


def check_evaluation_folder(task: Task, weights: str) -> None:
    """Refuse to overwrite the results of another run, or of other data; write nothing.

    Args:
        task: names the folder for the results, and the data.
        weights: the file to evaluate.

    Raises:
        ConfigError: the folder cannot be written to, holds a run to which ``weights`` does not
            belong, or holds results of other data.
    """
    run = _writable_folder(task.settings)
    folder = run.path
    own = "://" not in weights and folder.resolve() in Path(weights).resolve().parents
    if run.holds_run and not own:
        raise ConfigError(
            f"{folder} holds another run, whose results would be overwritten: {weights} is not of "
            "it; give another --output."
        )
    for changed, before, now in run.changed_keys(task.dump()):
        if f"{changed}.".startswith(task.test_keys) and not _are_one_file(before, now, folder):
            raise ConfigError(
                f"The results in {folder} belong to {changed} {before!r}, and would be mixed with "
                f"results of {now!r}: lambda-det evaluate {folder} evaluates on other "
                f"data in a folder of their own; or give another --output, with "
                f"{task.settings.option('weights', weights)}."
            )


def _are_one_file(before: object, now: object, folder: Path) -> bool:
    """Whether two places name one file: in another spelling, or moved together with the folder."""
    if not (isinstance(before, str) and isinstance(now, str)):
        return False
    then, here = Path(before), Path(now)
    if then.exists() and here.exists():
        return then.samefile(here)
    is_inside = here.resolve().is_relative_to(folder.resolve())
    return is_inside and here.parts[-2:] == then.parts[-2:]


def _writable_folder(settings: Settings) -> RunFolder:
    run = RunFolder(settings.output_dir)
    refuse_unwritable(run.path)
    return run


def _weights_to_evaluate(task: Task, resume: bool) -> Checkpoint:
    settings = task.settings
    if resume:
        checkpoint = _read_newest_on_all(settings.output_dir)
        if checkpoint is None:
            raise WeightsError(
                f"--eval-only --resume evaluates the last checkpoint, and {settings.output_dir} "
                "holds none."
            )
        return checkpoint
    if not settings.weights:
        raise ConfigError(
            f"--eval-only needs weights: add {settings.option('weights', 'FILE')} at the end of "
            "the command line, or --resume for the last checkpoint of the run."
        )
    return Checkpoint(settings.weights, on_all(lambda: read_weights(settings.weights)))


def _read_newest_on_all(folder: str) -> Checkpoint | None:
    """The newest whole checkpoint of a run folder, which the first process finds for all."""
    checkpoint = on_main_process(lambda: RunFolder(folder).read_newest())
    path = comm.all_gather(checkpoint.path if checkpoint else "")[0]
    if not path:
        return None
    if not all(comm.all_gather(os.path.isfile(path))):
        raise WeightsError(
            f"Not every process finds the checkpoint {path}; give all machines the same folder."
        )
    return on_all(lambda: checkpoint or Checkpoint(path, read_checkpoint(path)))


def _open_folder(task: Task, log: BufferedLog, lock: RunLock | None = None) -> None:
    folder = task.settings.output_dir
    if comm.is_main_process():
        Path(folder).mkdir(parents=True, exist_ok=True)
    comm.synchronize()
    if lock is not None:
        on_main_process(lock.acquire)  # the folder may not have been there before
    log.open(folder)


def _log_changes(task: Task, changes: list[Change]) -> None:
    """Say how a resumed run differs from the one that was started."""
    if changes:
        text = ", ".join(f"{key} {before!r} -> {now!r}" for key, before, now in changes)
        logger.info(f"Changed since the run was started: {text}")
    others = [key for key, *_ in changes if on_resume(task.on_resume, key) == SAMPLES]
    if others:
        logger.warning(
            f"{', '.join(others)} changed: from here on the samples are others than those of the "
            "run that was started, unless only the place of its data changed"
        )
