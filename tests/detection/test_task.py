"""What a detection task evaluates, and under which names the results are."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from lambda_det.config import FIXED, on_resume
from lambda_det.detection import DetectionTask
from lambda_det.detection import task as task_module
from lambda_det.detection.config_files import get_config
from lambda_det.detection.model import for_inference
from lambda_det.detection.task import read_components
from lambda_det.errors import ConfigError
from lambda_det.native.calls import copied
from lambda_det.training.evaluation import Evaluation
from lambda_det.training.task import EMA, RAW
from tests.training.tiny_detector import tiny_config
from tests.training.toy import settings


class Detector(torch.nn.Module):
    def __init__(self, ap: float) -> None:
        super().__init__()
        self.ap = ap


MODELS = {RAW: Detector(1.0), EMA: Detector(2.0)}


@pytest.fixture
def evaluate(monkeypatch):
    """``evaluate(data sets, final)`` of models whose AP is known, and the endings of folders."""
    endings: list[str] = []
    monkeypatch.setattr(
        task_module,
        "inference_on_dataset",
        lambda model, loader, evaluator: {"bbox": {"AP": model.ap}},
    )

    def call(names: tuple[str, ...], *, final: bool, precision: str = "float32", **parts) -> dict:
        cfg = tiny_config()
        cfg.TEST.AUG.ENABLED, cfg.TEST.PRECISION = True, precision
        task = DetectionTask(cfg)
        given = {
            "make_test_loader": lambda name: None,
            "make_evaluator": lambda name, ending: endings.append(ending),
            "make_augmented": lambda model: SimpleNamespace(ap=10 * model.ap),
            "test_sets": names,
        }
        task.components = dataclasses.replace(task.components, **(given | parts))
        return task.evaluate(MODELS, final=final)

    return call, endings


def test_averaged_weights_and_augmentation_have_results_of_their_own(evaluate):
    call, endings = evaluate
    averaged = {"bbox": {"AP": 1.0}, "bbox_EMA": {"AP": 2.0}}
    assert call(("one",), final=False) == averaged
    assert endings == ["", "_EMA"]
    # Once, when training is over, and of the averaged weights
    everything = averaged | {"bbox_TTA": {"AP": 20.0}}
    assert call(("one",), final=True) == everything
    assert endings[2:] == ["", "_EMA", "_TTA"]
    assert call(("one", "two"), final=True) == {"one": everything, "two": everything}


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_an_evaluation_runs_the_copy_for_inference(evaluate, monkeypatch, precision):
    norm = torch.nn.BatchNorm2d(4)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 1), norm).eval()
    given = []
    monkeypatch.setattr(task_module, "inference_on_dataset", lambda *parts: given.append(parts[0]))
    monkeypatch.setitem(MODELS, RAW, model)
    monkeypatch.delitem(MODELS, EMA)
    evaluate[0](("one",), final=False, precision=precision)
    [copied] = given
    assert not any(isinstance(module, torch.nn.BatchNorm2d) for module in copied.modules())
    assert model[1] is norm
    assert copied(torch.randn(1, 3, 2, 2)).dtype == getattr(torch, precision)


@pytest.mark.parametrize("benchmark", [False, True])
def test_cudnn_tries_no_algorithms_for_the_sizes_of_an_evaluation(evaluate, monkeypatch, benchmark):
    cudnn, during = torch.backends.cudnn, []
    monkeypatch.setattr(cudnn, "benchmark", benchmark)
    parts = {"make_test_loader": lambda name: during.append(cudnn.benchmark)}
    evaluate[0](("one",), final=False, **parts)
    assert set(during) == {False} and cudnn.benchmark is benchmark


@pytest.mark.parametrize(
    ("values", "best"),
    [
        ({"bbox/AP": 3.0, "bbox_EMA/AP": 2.0, "bbox_TTA/AP": 9.0}, 2.0),
        ({"segm/AP": 3.0, "bbox_EMA/AP": 9.0, "segm_EMA/AP": 2.0}, 9.0),
        ({"bbox/AP": 3.0, "bbox_TTA/AP": 9.0}, 3.0),
    ],
)
def test_the_best_checkpoint_is_that_of_the_averaged_weights(values, best):
    evaluation = Evaluation()
    evaluation.trainer = SimpleNamespace(settings=settings(), task=DetectionTask)
    evaluation._compare(values, 1)
    assert evaluation.best == best


def test_an_implementation_that_no_evaluation_can_use_is_refused_before_the_training():
    cfg = get_config("finetune/light_lambdaresnet26.yaml")
    cfg.MODEL.WEIGHTS = ""
    cfg.MODEL.LAMBDA_RESNET.IMPLEMENTATION, cfg.TEST.PRECISION = "fused", "float32"
    with pytest.raises(ConfigError, match=r"fused computes in 16 bits.*TEST\.PRECISION"):
        DetectionTask(cfg).build_model()
    cfg.TEST.PRECISION = "bfloat16"
    DetectionTask(cfg).build_model()


def test_a_backbone_is_compiled_for_the_training_alone():
    cfg = tiny_config()
    cfg.MODEL.COMPILE, cfg.INPUT.LSJ.ENABLED = True, True
    task = DetectionTask(cfg)
    model = task.build_model()
    task.distribute(model)
    compiled = [name for name, part in model.named_modules() if part._compiled_call_impl]
    assert compiled == ["backbone"]
    for other in (for_inference(model), copied(model)):  # an evaluation, and averaged weights
        assert not any(part._compiled_call_impl for part in other.modules())
    cfg.INPUT.LSJ.ENABLED = False
    task = DetectionTask(cfg)
    with pytest.raises(ConfigError, match=r"MODEL\.COMPILE is True.*INPUT\.LSJ"):
        task.build_model()
    task._is_trained = False  # as an evaluation is
    task.build_model()


def test_a_lazyconfig_s_run_stays_compiled_or_not():
    config = get_config("mask_rcnn_lambdaresnet50.py")
    config.train.compile = True
    components = read_components(config)
    assert components.settings.compile and on_resume(components.on_resume, "train.compile") == FIXED
