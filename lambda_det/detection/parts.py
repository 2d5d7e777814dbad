"""What a configuration says of a detector's training, whichever kind of file it was read from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from detectron2.data.transforms import AugmentationList
from detectron2.evaluation import DatasetEvaluator
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lambda_det.detection.data.predictions import Detector
from lambda_det.detection.schedule import DetectionSettings
from lambda_det.training.settings import FixedKeys
from lambda_det.training.task import Results
from lambda_det.weights.provenance import PixelSettings

__all__ = ["Parts", "padded"]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The parts of a detector's training, which :class:`DetectionTask` puts together.

    :func:`read_yaml` and :func:`read_lazy` fill it. Functions that take settings are given those
    of the run: fitted to the data and to the number of processes.

    Attributes:
        settings: as written.
        detector: what the model predicts, as far as its data depend on it.
        pixels: what the model makes of images; None if unknown.
        train_names, test_names: the data sets to train and to evaluate on; empty where a loader of
            another project names its data in another way.
        test_sets: what each evaluation of its own runs on; empty for no evaluation.
        training_size: height and width of the largest image of a training batch, padded to a stride
            of 32; None if unknown.
        channels_last: whether all maps are so in inference, and in training where it is faster.
        test_precision: in which evaluation and prediction compute, "float32" or "bfloat16".
        test_loss: whether an evaluation in a training also computes the losses.
        with_recipe: whether the schedule follows from the data.
        kept: the user's keys that neither the data nor the number of processes change.
        fixed_keys, sample_keys, advice: see :class:`lambda_det.training.task.Task`.
        ddp_options: of :func:`lambda_det.distributed.connection.distribute`.

        make_model: the whole model, where PyTorch makes its tensors.
        make_backbone: of only the model, with an FPN if it has one.
        make_optimizer, make_scheduler: for the settings of a run, and a model or its optimiser.
        make_train_loader: for the settings of a run.
        make_test_loader, make_loss_loader: for one of ``test_sets``; the latter with ground truth.
        make_evaluator: for one of ``test_sets``, and the folder for its files.
        make_test_augmentations: what an evaluation does to an image: it is resized.
        make_augmented: a model that averages over augmented images; None where that is off.
        check_data: see :meth:`lambda_det.training.task.Task.check_data`.
        register: register the data sets that are named by their files, and complete the
            configuration.
        fit: change the configuration as a recipe says for the data; given the settings of the file
            without the command line, for the log.
        verify: the results that are expected at the end of a run.
        dump: the configuration as YAML.
    """

    settings: DetectionSettings
    detector: Detector
    pixels: PixelSettings | None
    train_names: tuple[str, ...]
    test_names: tuple[str, ...]
    test_sets: tuple[str, ...]
    training_size: tuple[int, int] | None
    channels_last: bool
    test_precision: str
    test_loss: bool
    with_recipe: bool
    kept: tuple[str, ...]
    fixed_keys: FixedKeys
    sample_keys: FixedKeys
    advice: str
    ddp_options: Mapping[str, bool] = field(default_factory=dict)

    make_model: Callable[[], nn.Module]
    make_backbone: Callable[[], nn.Module]
    make_optimizer: Callable[[DetectionSettings, nn.Module], Optimizer]
    make_scheduler: Callable[[DetectionSettings, Optimizer], LRScheduler]
    make_train_loader: Callable[[DetectionSettings], Iterable]
    make_test_loader: Callable[[str], Iterable]
    make_loss_loader: Callable[[str], Iterable]
    make_evaluator: Callable[[str, str], DatasetEvaluator | list[DatasetEvaluator]]
    make_test_augmentations: Callable[[], AugmentationList]
    make_augmented: Callable[[nn.Module], nn.Module] | None = None
    check_data: Callable[[bool], None]
    register: Callable[[], None]
    fit: Callable[[DetectionSettings], object]
    verify: Callable[[Results], object] = lambda results: None
    dump: Callable[[], str]


def padded(height: int, width: int) -> tuple[int, int]:
    """The sides of an image, padded to a stride of 32."""
    return -(-height // 32) * 32, -(-width // 32) * 32
