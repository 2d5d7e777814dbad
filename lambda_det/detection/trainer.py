"""The detection trainer: Detectron2's DefaultTrainer on any device, in any precision."""

from __future__ import annotations

import argparse
import functools
import logging
import weakref
from collections.abc import Iterable
from pathlib import Path

from detectron2.config import CfgNode
from detectron2.engine import DefaultTrainer, HookBase, TrainerBase, hooks
from detectron2.evaluation import DatasetEvaluator, verify_results
from detectron2.modeling import build_backbone, build_model
from detectron2.solver import build_optimizer
from detectron2.utils import comm
from fvcore.nn.precise_bn import get_bn_modules
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lambda_det.detection import data
from lambda_det.detection.evaluation import build_evaluator
from lambda_det.detection.model_check import build_for_trial
from lambda_det.detection.point_rend import bear_empty_batches
from lambda_det.detection.scaling import images_per_batch, scale_schedule
from lambda_det.detection.schedule import build_lr_scheduler
from lambda_det.errors import ConfigError
from lambda_det.modeling.norm import convert_sync_norms
from lambda_det.training.checkpointer import SafeCheckpointer
from lambda_det.training.clipping import add_clipping
from lambda_det.training.config_file import load_config
from lambda_det.training.hooks import Histories, RunWriter
from lambda_det.training.loop import checkpoint_to_resume, distribute, last_saved, run_steps
from lambda_det.training.milestones import Checkpoints, Evaluation, PreciseStatistics
from lambda_det.training.precision import Precision, pool_in_float32
from lambda_det.training.run_folder import DETECTION_KEYS
from lambda_det.training.step import StepTrainer
from lambda_det.weights.provenance import PixelSettings

__all__ = ["DetectionTrainer"]

logger = logging.getLogger(__name__)


class DetectionTrainer(DefaultTrainer):
    """Trains what the configuration says, checkpoints it, evaluates it, and can be resumed.

    Attributes:
        cfg: the configuration, scaled to the number of workers.
        checkpointer: a :class:`SafeCheckpointer` of model and training state.
        saved_as: name of the checkpoint that was saved or loaded last, without its ending.
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
        self.saved_as = ""
        self.checkpointer = SafeCheckpointer(
            model, cfg.OUTPUT_DIR, keep=self.checkpoints_kept, trainer=weakref.proxy(self)
        )
        self._trainer = StepTrainer(
            self.distribute(cfg, model),
            loader,
            optimizer,
            precision=Precision.from_config(cfg),
            accumulate=cfg.SOLVER.ACCUMULATE_GRADIENTS,
            seed=cfg.SEED if cfg.SEED >= 0 else comm.shared_random_seed(),
            last_checkpoint=functools.partial(last_saved, self.checkpointer),
        )
        self.scheduler = self.build_lr_scheduler(cfg, optimizer)
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
    def build_optimizer(cls, cfg: CfgNode, model: nn.Module) -> Optimizer:
        plain = cfg.clone()
        plain.defrost()
        plain.SOLVER.CLIP_GRADIENTS.ENABLED = False
        return add_clipping(cfg, build_optimizer(plain, model))

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
        """DefaultTrainer's hooks, but that a checkpoint comes before what may take minutes."""
        cfg = self.cfg
        statistics = None
        if cfg.TEST.PRECISE_BN.ENABLED and get_bn_modules(self._model):
            few_workers = cfg.clone()
            few_workers.defrost()
            few_workers.DATALOADER.NUM_WORKERS = 0  # it runs now and then; workers would idle
            loader = self.build_train_loader(few_workers)
            iterations = cfg.TEST.PRECISE_BN.NUM_ITER
            statistics = PreciseStatistics(
                cfg.TEST.EVAL_PERIOD, self._trainer.model, loader, iterations
            )
        self._evaluation = Evaluation(cfg.TEST.EVAL_PERIOD, cfg.TEST.BEST_METRIC, statistics)
        return [
            hooks.IterationTimer(),
            hooks.LRScheduler(),
            Histories(),
            Checkpoints(cfg.SOLVER.CHECKPOINT_PERIOD, self._evaluation.is_due),
            self._evaluation,
            RunWriter(cfg.OUTPUT_DIR, period=self.log_period),
        ]

    def evaluate(self) -> dict:
        """The results of the model as it is, on the first process."""
        # The bare model: in evaluation the processes have unequal numbers of batches
        return self.test(self.cfg, self._model)

    @property
    def seed(self) -> int:
        """Of all random numbers of the run; that of its checkpoint, if it was resumed."""
        return self._trainer.seed

    @property
    def stop_signal(self) -> int:
        """See :class:`StepTrainer`."""
        return self._trainer.stop_signal

    def save_checkpoint(self, name: str) -> None:
        """Save model and training state as they are after this step."""
        self.checkpointer.save(name, iteration=self.iter)
        self.saved_as = name

    def resume_or_load(self, resume: bool = True) -> None:
        """Continue from the last checkpoint, or begin with MODEL.WEIGHTS, or from scratch.

        Raises:
            WeightsError: no checkpoint is whole, it does not fit, or not every process sees it.
            ConfigError: the checkpoint is of a run with another number of images per step, or the
                weights are for images of other pixel settings.
        """
        path = checkpoint_to_resume(self.cfg.OUTPUT_DIR) if resume else ""
        if path:
            self.checkpointer.load_everything(path)
            self.start_iter = self.iter + 1
            self.saved_as = Path(path).stem
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

    def debug_numerics(self) -> None:
        """See :class:`StepTrainer`."""
        self._trainer.debug_numerics()

    def train(self) -> dict | None:
        """Run from ``start_iter`` to SOLVER.MAX_ITER.

        Returns:
            The results of the last evaluation, on the first process.

        Raises:
            NonFiniteLossError: see :class:`StepTrainer`.
            Preempted: a scheduler's signal ended the run; see :func:`run_steps`.
        """
        if self.start_iter >= self.max_iter:
            logger.info(f"The run has all of its {self.max_iter} iterations already")
        logger.info(f"Training from iteration {self.start_iter} to {self.max_iter}")
        run_steps(self)
        self._trainer.log_skipped_steps(self.max_iter)
        if not comm.is_main_process():
            return None
        if len(self.cfg.TEST.EXPECTED_RESULTS):
            verify_results(self.cfg, self._evaluation.results)
        return self._evaluation.results

    def before_train(self) -> None:
        """Begin the training images where the run is, and then as the hooks do."""
        logger.info(f"Random numbers and the order of images are drawn from seed {self.seed}")
        loader = self._trainer.data_loader
        if hasattr(loader, "begin"):
            loader.begin(self.seed, self.start_iter * self.cfg.SOLVER.ACCUMULATE_GRADIENTS)
        elif self.start_iter > 0:
            logger.warning(
                f"The training loader, a {type(loader).__name__}, cannot be begun in the midst of "
                "its images: their order starts anew"
            )
        super().before_train()

    def state_dict(self) -> dict:
        state = super().state_dict()
        state["images_per_step"] = self.cfg.SOLVER.IMS_PER_BATCH
        state["seed"] = self.seed
        loader = self._trainer.data_loader
        if hasattr(loader, "state_dict"):
            state["data"] = loader.state_dict()
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
        if "seed" not in state_dict:
            logger.warning(
                "The checkpoint is of an earlier version, without the seed of its run: the order "
                "of images, random numbers and the smoothed values of the log start anew"
            )
            return
        self._trainer.seed = state_dict["seed"]
        loader = self._trainer.data_loader
        if "data" in state_dict and hasattr(loader, "load_state_dict"):
            loader.load_state_dict(state_dict["data"])
