"""The detection trainer: Detectron2's DefaultTrainer on any device, in any precision."""

from __future__ import annotations

import argparse
import logging
import weakref
from collections.abc import Iterable

from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer, HookBase, TrainerBase, hooks
from detectron2.evaluation import DatasetEvaluator, verify_results
from detectron2.modeling import build_backbone, build_model
from detectron2.utils import comm
from fvcore.nn.precise_bn import get_bn_modules
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lambda_det import data
from lambda_det.engine.checkpointer import SafeCheckpointer, last_checkpoint
from lambda_det.engine.config_file import load_config
from lambda_det.engine.evaluation import build_evaluator
from lambda_det.engine.hooks import RunWriter, batches_with_objects
from lambda_det.engine.loop import distribute, run_steps
from lambda_det.engine.model_check import build_for_trial
from lambda_det.engine.point_rend import bear_empty_batches
from lambda_det.engine.precision import Precision, pool_in_float32
from lambda_det.engine.run_folder import DETECTION_KEYS
from lambda_det.engine.scaling import images_per_batch, scale_schedule
from lambda_det.engine.schedule import build_lr_scheduler
from lambda_det.engine.step import StepTrainer
from lambda_det.errors import ConfigError, WeightsError
from lambda_det.modeling.norm import convert_sync_norms
from lambda_det.modeling.provenance import PixelSettings

__all__ = ["DetectionTrainer"]

logger = logging.getLogger(__name__)


class DetectionTrainer(DefaultTrainer):
    """Trains what the configuration says, checkpoints it, evaluates it, and can be resumed.

    Attributes:
        cfg: the configuration, scaled to the number of workers.
        checkpointer: a :class:`SafeCheckpointer` of model and training state.
        checkpoints_kept: so many, the newest; all of a long run would fill the disk.
        log_period: steps between two lines of the log.
        fixed_keys: what a resumed run must keep.
    """

    checkpoints_kept = 5
    log_period = 20
    fixed_keys = DETECTION_KEYS

    def __init__(self, cfg: CfgNode) -> None:
        # Not DefaultTrainer.__init__: it passes device_ids to DDP on the CPU, where they are
        # refused, takes AMPTrainer, which asserts CUDA and float16, and calls its own
        # auto_scale_workers by class name, past any override.
        TrainerBase.__init__(self)
        cfg = scale_schedule(cfg, comm.get_world_size())
        model = self.build_model(cfg)
        optimizer = self.build_optimizer(cfg, model)
        loader = self.build_train_loader(cfg)
        self._model = model
        self._trainer = StepTrainer(
            self.distribute(cfg, model),
            loader,
            optimizer,
            precision=Precision.from_config(cfg),
            accumulate=cfg.SOLVER.ACCUMULATE_GRADIENTS,
            last_checkpoint=lambda: last_checkpoint(cfg.OUTPUT_DIR),
        )
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
        self.checkpointer = SafeCheckpointer(model, cfg.OUTPUT_DIR, trainer=weakref.proxy(self))
        self.max_iter = cfg.SOLVER.MAX_ITER
        self.cfg = cfg
        self.register_hooks(self.build_hooks())

    @classmethod
    def load_config(cls, args: argparse.Namespace) -> CfgNode:
        """The configuration that the command line names, not frozen."""
        return load_config(args)

    @classmethod
    def register_data(cls, cfg: CfgNode) -> None:
        """Make the data sets known that ``cfg`` names by their files, and complete ``cfg``."""
        data.register_json_datasets(cfg)

    @classmethod
    def check_data(cls, cfg: CfgNode, *, train: bool, test: bool) -> None:
        data.check_datasets(cfg, train=train, test=test)

    @classmethod
    def build_for_trial(cls, cfg: CfgNode) -> nn.Module:
        """The model without values, to refuse what cannot be built before anything is written."""
        return build_for_trial(cfg)

    @classmethod
    def pixel_settings(cls, cfg: CfgNode) -> PixelSettings | None:
        """What the model makes of images; None if nobody knows."""
        return PixelSettings.from_config(cfg)

    @classmethod
    def make_model(cls, cfg: CfgNode) -> nn.Module:
        """The model as it is described."""
        return build_model(cfg)

    @classmethod
    def build_backbone(cls, cfg: CfgNode) -> nn.Module:
        """Of the model alone, with an FPN if it has one."""
        return build_backbone(cfg)

    @classmethod
    def distribute(cls, cfg: CfgNode, model: nn.Module) -> nn.Module:
        return distribute(model, cfg.MODEL.DEVICE)

    @classmethod
    def build_model(cls, cfg: CfgNode) -> nn.Module:
        """The model on its device, with norms and pooling that are right there."""
        # PyTorch 2.15 warns of a call in Detectron2's forward pass, in the midst of the progress
        logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)
        model = convert_sync_norms(cls.make_model(cfg), cfg.MODEL.DEVICE)
        bear_empty_batches(model)
        if cfg.SOLVER.AMP.ENABLED:
            pool_in_float32(model)
        return model.to(cfg.MODEL.DEVICE)

    @classmethod
    def build_train_loader(cls, cfg: CfgNode) -> Iterable:
        return data.build_train_loader(cfg, images_per_batch(cfg))

    @classmethod
    def build_test_loader(cls, cfg: CfgNode, dataset_name: str) -> Iterable:
        return data.build_test_loader(cfg, dataset_name)

    @classmethod
    def build_evaluator(cls, cfg: CfgNode, dataset_name: str) -> DatasetEvaluator:
        return build_evaluator(cfg, dataset_name)

    @classmethod
    def build_lr_scheduler(cls, cfg: CfgNode, optimizer: Optimizer) -> LRScheduler:
        return build_lr_scheduler(cfg, optimizer)

    def build_hooks(self) -> list[HookBase]:
        """DefaultTrainer's hooks in its order: precise statistics, checkpoint, AP, log."""
        cfg = self.cfg
        result = [hooks.IterationTimer(), hooks.LRScheduler()]
        if cfg.TEST.PRECISE_BN.ENABLED and get_bn_modules(self._model):
            few_workers = cfg.clone()
            few_workers.defrost()
            few_workers.DATALOADER.NUM_WORKERS = 0  # it runs now and then; workers would idle
            loader = batches_with_objects(self.build_train_loader(few_workers))
            iterations = cfg.TEST.PRECISE_BN.NUM_ITER
            result.append(
                hooks.PreciseBN(cfg.TEST.EVAL_PERIOD, self._trainer.model, loader, iterations)
            )
        if comm.is_main_process():
            period = cfg.SOLVER.CHECKPOINT_PERIOD
            kept = self.checkpoints_kept
            result.append(hooks.PeriodicCheckpointer(self.checkpointer, period, max_to_keep=kept))
        result.append(hooks.EvalHook(cfg.TEST.EVAL_PERIOD, self._evaluate))
        if comm.is_main_process():
            result.append(RunWriter(cfg.OUTPUT_DIR, period=self.log_period))
        return result

    def _evaluate(self) -> dict:
        # The bare model: in evaluation the processes have unequal numbers of batches
        self._last_eval_results = self.test(self.cfg, self._model)
        return self._last_eval_results

    def resume_or_load(self, resume: bool = True) -> None:
        """Continue from the last checkpoint, or begin with MODEL.WEIGHTS, or from scratch.

        Raises:
            WeightsError: the file cannot be read or does not fit, or not every process sees it.
            ConfigError: the checkpoint is of a run with another number of images per step, or the
                weights are for images of other pixel settings.
        """
        path = last_checkpoint(self.cfg.OUTPUT_DIR) if resume else ""
        if path:
            self.checkpointer.load_everything(path)
            self.start_iter = self.iter + 1
            if self.start_iter < self.max_iter:
                # The saved rate of the next step is the former schedule's, if there is a new one
                rates = self.scheduler.get_lr()
                for group, rate in zip(self._trainer.optimizer.param_groups, rates, strict=True):
                    group["lr"] = rate
        else:
            if resume:
                logger.info(f"--resume: {self.cfg.OUTPUT_DIR} holds no checkpoint, so this starts")
            if self.cfg.MODEL.WEIGHTS:
                pixels = self.pixel_settings(self.cfg)
                self.checkpointer.load_initial_weights(self.cfg.MODEL.WEIGHTS, pixels)
            else:
                logger.info("No weights are named: training from scratch")
        starts = comm.all_gather(self.start_iter)
        if len(set(starts)) > 1:
            raise WeightsError(
                f"Not every process finds the checkpoint in {self.cfg.OUTPUT_DIR} (they would "
                f"begin at iterations {starts}); give all machines the same folder."
            )

    def train(self) -> dict | None:
        """Run from ``start_iter`` to SOLVER.MAX_ITER.

        Returns:
            The results of the last evaluation, on the first process.

        Raises:
            NonFiniteLossError: see :class:`StepTrainer`.
        """
        if self.start_iter >= self.max_iter:
            logger.info(f"The run has all of its {self.max_iter} iterations already")
        logger.info(f"Training from iteration {self.start_iter} to {self.max_iter}")
        run_steps(self)
        if not comm.is_main_process():
            return None
        if len(self.cfg.TEST.EXPECTED_RESULTS):
            verify_results(self.cfg, self._last_eval_results)
        return self._last_eval_results

    def state_dict(self) -> dict:
        state = super().state_dict()
        state["images_per_step"] = self.cfg.SOLVER.IMS_PER_BATCH
        return state

    def load_state_dict(self, state_dict: dict) -> None:
        before, now = state_dict.get("images_per_step"), self.cfg.SOLVER.IMS_PER_BATCH
        if before is not None and before != now:
            raise ConfigError(
                f"The run in {self.cfg.OUTPUT_DIR} takes {before} images a step, and with "
                f"{comm.get_world_size()} worker(s) x SOLVER.ACCUMULATE_GRADIENTS "
                f"{self.cfg.SOLVER.ACCUMULATE_GRADIENTS} it would take {now}: its count of steps "
                f"means nothing then. Keep workers x SOLVER.ACCUMULATE_GRADIENTS as it was."
            )
        super().load_state_dict(state_dict)
