"""A value that a library refuses is one sentence with the key, the value and the refusing line."""

import linecache
from pathlib import Path

import pytest
import torch
from detectron2.config import CfgNode
from detectron2.structures import BoxMode
from torch._utils import ExceptionWrapper

import lambda_det
from lambda_det.config import CONFIGS, leaves
from lambda_det.detection import DetectionTask, lazy_parser, parser
from lambda_det.detection.components import of_yaml
from lambda_det.detection.config_files import load_file
from lambda_det.detection.schedule import scale_settings
from lambda_det.errors import ConfigError
from lambda_det.training.command_line import main
from lambda_det.training.library_errors import naming_keys
from tests.detection.heads.tiny import HEADS
from tests.detection.tiny import NARROW, TINY, on_meta, write_lazy_config
from tests.training.tiny_detector import tiny_config

RCNN, RETINANET = "cascade_mask_rcnn", "retinanet"
# (head, key, value)
OF_MODELS = [
    (RCNN, "MODEL.ROI_MASK_HEAD.POOLER_TYPE", "RoIAlign"),
    (RCNN, "MODEL.LAMBDA_RESNET.NORM", "SynBN"),
    (RCNN, "MODEL.ROI_BOX_HEAD.NORM", "SynBN"),
    (RCNN, "MODEL.META_ARCHITECTURE", "GeneralisedRCNN"),
    (RCNN, "MODEL.BACKBONE.NAME", "build_resnet_fpn_backbon"),
    (RCNN, "MODEL.ROI_HEADS.NAME", "CascadeHeads"),
    (RCNN, "MODEL.ANCHOR_GENERATOR.SIZES", [[32], [64]]),
    (RCNN, "MODEL.ANCHOR_GENERATOR.OFFSET", 1.5),
    (RCNN, "MODEL.FPN.IN_FEATURES", ["res2", "res9"]),
    (RCNN, "MODEL.ROI_HEADS.IN_FEATURES", ["p2", "p9"]),
    (RCNN, "MODEL.FPN.IN_FEATURES", ["res2", "res4"]),
    (RCNN, "MODEL.FPN.IN_FEATURES", []),
    (RCNN, "MODEL.RPN.IOU_LABELS", [0, 5, 1]),
    (RCNN, "MODEL.RPN.IOU_THRESHOLDS", [0.3]),
    (RCNN, "MODEL.ROI_BOX_CASCADE_HEAD.IOUS", (0.5, 0.6)),
    (RCNN, "MODEL.ROI_BOX_HEAD.NUM_FC", 0),
    (RCNN, "MODEL.ROI_BOX_HEAD.CLS_AGNOSTIC_BBOX_REG", False),
    (RETINANET, "MODEL.RETINANET.PRIOR_PROB", 1.5),
    ("panoptic_fpn", "MODEL.SEM_SEG_HEAD.NAME", "SemSeg"),
    ("panoptic_fpn", "MODEL.SEM_SEG_HEAD.IN_FEATURES", ["p2", "p9"]),
    ("deeplab", "MODEL.SEM_SEG_HEAD.LOSS_TYPE", "l2"),
    ("point_rend", "MODEL.POINT_HEAD.NUM_CLASSES", 7),
]
# Refused when a batch is made, in the first step, or before the model is made
OF_RUNS = [
    (RCNN, "SOLVER.WARMUP_METHOD", "cosine"),
    (RCNN, "INPUT.MASK_FORMAT", "poly"),
    (RCNN, "INPUT.MIN_SIZE_TRAIN_SAMPLING", "range"),
]


def _words(head: str, *pairs: object) -> list[str]:
    file = str(CONFIGS / f"{HEADS[head].config}.yaml")
    return ["--config-file", file, *HEADS[head].opts(), "MODEL.DEVICE", "cpu", *map(str, pairs)]


def _load(head: str, *pairs: object) -> CfgNode:
    _, file, *opts = _words(head, *pairs)
    return load_file(file, opts)


def _check(text: str, key: str, value: object, allowed: str = "") -> None:
    shown = [str(value)]
    if isinstance(value, list | tuple):  # as a list, or the one name that is wrong
        shown += [str(list(value)), *map(repr, value[-1:])]
    assert key in text and any(each in text for each in shown) and allowed in text, text
    assert "\n" not in text.strip(), text


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("INPUT.MAX_SIZE_TEST", 0),
        ("INPUT.MIN_SIZE_TRAIN", ()),
        ("MODEL.ANCHOR_GENERATOR.SIZES", [[16], [32], [64], [96], [96, 128]]),
        ("MODEL.PIXEL_STD", [0.0, 1.0, 1.0]),
        ("MODEL.ROI_BOX_HEAD.BBOX_REG_LOSS_TYPE", "iou"),
        ("MODEL.ROI_BOX_HEAD.BBOX_REG_WEIGHTS", (10.0, 10.0)),
        ("MODEL.ROI_HEADS.NUM_CLASSES", 0),
        ("MODEL.ROI_HEADS.SCORE_THRESH_TEST", 5.0),
        ("MODEL.RPN.BATCH_SIZE_PER_IMAGE", 0),
        ("MODEL.RPN.CONV_DIMS", [0]),
        ("MODEL.RPN.SMOOTH_L1_BETA", -1.0),
        ("MODEL.SEM_SEG_HEAD.COMMON_STRIDE", 3),
        ("SEED", 2**40),
        ("SOLVER.MAX_ITER", -1),
        ("TEST.AUG.MIN_SIZES", ()),
        ("TEST.DETECTIONS_PER_IMAGE", 0),
        ("TEST.IMS_PER_BATCH", 0),
        ("TEST.PRECISION", "float8"),
        ("TEST.EXPECTED_RESULTS", [["bbox", "AP", 38.5]]),
    ],
)
def test_what_detectron2_would_take_in_silence_or_refuse_after_hours(key, value):
    """What the last evaluation reads is refused before the training."""
    with pytest.raises(ConfigError) as caught:
        of_yaml(_load(RCNN, key, value))
    _check(str(caught.value), key, value, "it must be ")


def test_no_steps_are_refused_where_there_is_a_training():
    """Scaled to the processes they would be one."""
    cfg = _load(RCNN, "SOLVER.MAX_ITER", 0)
    DetectionTask(cfg).prepare(train=False)
    with pytest.raises(ConfigError) as caught:
        scale_settings(of_yaml(cfg).settings, 1)
    _check(str(caught.value), "SOLVER.MAX_ITER", 0, "it must be ")


@pytest.mark.parametrize(
    ("kind", "value", "allowed"),
    [
        ("relative_range", [0.5], "two numbers"),
        ("relative", [640, 640], "at most 1"),
        ("absolute", [0.5, 0.5], "two whole numbers"),
    ],
)
def test_a_crop_has_two_numbers_of_its_type(kind, value, allowed):
    keys = ("INPUT.CROP.ENABLED", True, "INPUT.CROP.TYPE", kind, "INPUT.CROP.SIZE", value)
    with pytest.raises(ConfigError) as caught:
        of_yaml(_load(RCNN, *keys))
    _check(str(caught.value), "INPUT.CROP.SIZE", value, allowed)


def test_what_may_be():
    # Torchvision's default -1 is Detectron2's 0: as many samples as a bin needs
    of_yaml(_load(RCNN, "MODEL.ROI_MASK_HEAD.POOLER_SAMPLING_RATIO", -1))
    # DeepLab's default is res2, which a backbone of a head without a decoder need not make
    on_meta(_load("deeplab", "MODEL.SEM_SEG_HEAD.PROJECT_FEATURES", ["res9"]))


@pytest.mark.parametrize(("head", "key", "value"), OF_MODELS)
def test_a_model_that_cannot_be_made_names_the_key(head, key, value):
    others = ["MODEL.ROI_BOX_HEAD.NUM_CONV", 0] if key.endswith("NUM_FC") else []
    with pytest.raises(ConfigError) as caught:
        on_meta(_load(head, key, value, *others))
    is_name = key.endswith(("NAME", "META_ARCHITECTURE"))
    _check(str(caught.value), key, value, "when its module is imported" if is_name else "")


@pytest.mark.slow
@pytest.mark.parametrize(("head", "key", "value"), OF_RUNS)
def test_a_command_ends_with_the_sentence_and_2(shapes, tmp_path, capsys, head, key, value):
    assert main(parser(), _words(head, key, value, "OUTPUT_DIR", tmp_path / "run")) == 2
    _check(capsys.readouterr().err, key, value)


@pytest.mark.slow
def test_a_lazy_config_names_its_key_as_well(shapes, tmp_path, capsys):
    key = "model.roi_heads.box_pooler.pooler_type"
    words = f"{TINY[1]} {NARROW[1]} train.output_dir={tmp_path / 'run'} {key}=RoIAlign"
    file = str(write_lazy_config(shapes))
    assert main(lazy_parser(), ["--config-file", file, *words.split()]) == 2
    _check(capsys.readouterr().err, key, "RoIAlign")


def test_a_fault_of_the_package_and_an_error_about_no_key_keep_their_stack(monkeypatch):
    values = list(leaves(_load(RCNN)))
    package = Path(lambda_det.__file__).parent
    for folder, name, expected in (
        (package, "format", ValueError),
        (package.parent, "shape", ValueError),  # which is not of the key, but has its value
        (package.parent, "format", ConfigError),
    ):
        text = f"{name} = 'polygon'\nraise ValueError(f'Unknown: {{{name}}}')\n"
        file = str(folder / "not_there.py")
        lines = text.splitlines(keepends=True)
        monkeypatch.setitem(linecache.cache, file, (len(text), None, lines, file))
        with pytest.raises(ValueError, match="polygon") as caught, naming_keys(lambda: values):
            exec(compile(text, file, "exec"), {})
        assert type(caught.value) is expected
    assert str(caught.value).startswith("INPUT.MASK_FORMAT is 'polygon'")
    with pytest.raises(AssertionError), naming_keys(lambda: values):
        BoxMode.convert([1, 2, 3], BoxMode.XYWH_ABS, BoxMode.XYXY_ABS)
    cfg = tiny_config()
    model = DetectionTask(cfg).build_model().train()
    image = torch.zeros(3, 64, 64, dtype=torch.uint8)
    with (
        pytest.raises(AssertionError, match="requires gt_instances"),
        naming_keys(lambda: leaves(cfg)),
    ):
        model([{"image": image}])


def test_a_key_in_the_stack_of_a_loader_process_is_not_blamed():
    """PyTorch raises the error again, with the stack of that process as its words."""
    cfg = _load(RCNN)
    try:
        int("x" + cfg.INPUT.FORMAT)
    except ValueError:
        from_process = ExceptionWrapper(where="in DataLoader worker process 0")
    assert "cfg.INPUT.FORMAT" in from_process.exc_msg
    with (
        pytest.raises(ValueError, match="Caught ValueError") as caught,
        naming_keys(lambda: leaves(cfg)),
    ):
        from_process.reraise()
    assert type(caught.value) is ValueError
