"""What the trainer needs from a task: its parts, its evaluation, and its messages."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from detectron2.engine import HookBase
from fvcore.common.param_scheduler import ParamScheduler
from torch import nn
from torch.optim import Optimizer

from lambda_det.distributed.connection import distribute
from lambda_det.training.config_file import ConfigFile
from lambda_det.training.settings import Settings
from lambda_det.weights.provenance import PixelSettings

# The weights that are evaluated: the trained ones, and their exponential moving average
RAW, EMA = "raw", "ema"

Results = dict[str, Any]  # numbers by name, nested to any depth


class Task(ABC):
    """A kind of training, such as detection, with one run's configuration.

    Attributes:
        settings: of this run; :meth:`prepare` fits them to the number of processes.
        on_resume: whether a resumed run may change a key, for :func:`lambda_det.config.on_resume`.
        test_keys: the beginnings of the keys that say which data an evaluation is on; in the folder
            of a run they are the run's.
        metrics: results by which a checkpoint may be the best; the first that exists counts.
        advice: what usually helps when a loss is not finite, for the end of a sentence.
        config_file: of the configuration, if it is not the one that the command line names.
        pixels: what the model makes of images; None if unknown.
    """

    settings: Settings
    on_resume: Mapping[str, str]
    test_keys: tuple[str, ...] = ()
    metrics: tuple[str, ...] = ()
    advice: str = "a lower learning rate"
    config_file: str | None = None
    pixels: PixelSettings | None = None

    # ------------------------------------------------------------------------------- configuration
    @classmethod
    @abstractmethod
    def read(cls, args: argparse.Namespace, file: ConfigFile | None = None) -> Task:
        """The task that a command line describes; it goes to each process of the run by pickling.

        Args:
            args: of the task's parser.
            file: ``args.config_file``, where it was opened already.

        Raises:
            ConfigError: the file is missing, or a key or value cannot be.
        """

    @abstractmethod
    def prepare(self, *, train: bool) -> Task:
        """Fit the task to the data and to the processes that there are; called in each of them.

        Args:
            train: whether it will be trained, and not only evaluated.

        Returns:
            The task, with its settings.

        Raises:
            ConfigError: a value cannot work, such as a batch that does not divide.
            DataError: the data are missing or damaged.
        """

    @property
    def device(self) -> tuple[str, str]:
        """The device that the configuration names, and the user's key for it."""
        return self.settings.device, self.settings.key("device")

    @abstractmethod
    def dump(self) -> str:
        """The configuration as YAML, which is saved as the run's config.yaml."""

    # --------------------------------------------------------------------------------------- parts
    @abstractmethod
    def build_model(self) -> nn.Module:
        """What is trained, on its device: takes a batch and returns losses by name, each a mean.

        Raises:
            ConfigError: the configuration describes no model.
        """

    def network(self, model: nn.Module) -> nn.Module:
        """The part of the model whose weights a checkpoint holds."""
        return model

    def distribute(self, model: nn.Module) -> nn.Module:
        """The model as it is trained by all processes together."""
        return distribute(model, self.settings.device)

    @abstractmethod
    def build_optimizer(self, model: nn.Module) -> Optimizer: ...

    @abstractmethod
    def build_schedule(self) -> ParamScheduler:
        """The learning rate as a multiple of the optimiser's, by the share of the steps, 0 to 1.

        It is made before the model, which takes longer.

        Raises:
            ConfigError: the configuration describes no schedule.
        """

    @abstractmethod
    def build_train_loader(self, *, for_statistics: bool = False) -> Iterable:
        """Endless batches to train on, or of the same images for batch norm's statistics.

        Loaders of this package have ``begin(seed, batches)``, after which an iterator skips that
        number of batches of all processes, and a state dict. Loaders of other projects may lack
        both; they start again.
        """

    def build_hooks(self) -> list[HookBase]:
        """Hooks besides the trainer's own."""
        return []

    # ------------------------------------------------------------------ checks before a run begins
    def check_data(self, *, train: bool) -> None:  # noqa: B027
        """Refuse data that cannot be trained or evaluated on; called on the first process.

        Args:
            train: whether there is a training, and not only an evaluation.

        Raises:
            ConfigError, DataError: one sentence.
        """

    def check_weights(self, content: Mapping[str, Any], path: str) -> None:  # noqa: B027
        """Refuse a checkpoint that fits the network only by its shapes; none by default."""

    # ---------------------------------------------------------------------------------- evaluation
    @abstractmethod
    def evaluate(self, models: Mapping[str, nn.Module], *, final: bool) -> Results:
        """Evaluate models; called on all processes alike.

        Args:
            models: by RAW and EMA.
            final: whether training is over.

        Returns:
            Results, on the first process at least; nothing where there is nothing to evaluate on.
        """

    def cost_of_evaluation(self) -> float:
        """What an evaluation takes at about, in images of a training step; 0 if unknown."""
        return 0.0

    def describe(self, results: Results) -> str:
        """Results in one line of the log; "" where they are shown elsewhere."""
        return ""

    def finish(self, results: Results) -> None:  # noqa: B027
        """Called on the first process at the end of training, or of an evaluation without one."""

    # --------------------------------------------------------------------- what the run says of it
    def smaller_batches(self) -> str:
        """The keys to type for the same steps with half of the images at once."""
        return self.settings.option("accumulate", 2 * self.settings.accumulate)

    def image_names(self, batch: Any) -> list[str]:
        """The names of the images of a batch, for messages; of Detectron2's by default."""
        images = [image for image in batch if isinstance(image, dict)]
        return [str(image["file_name"]) for image in images if "file_name" in image]

    def checkpoint_content(self, results: Results) -> dict[str, Any]:
        """What a checkpoint holds besides weights and training state.

        Args:
            results: of the weights in it; empty if they were not evaluated.
        """
        return {}
