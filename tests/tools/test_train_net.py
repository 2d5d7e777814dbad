"""tools/train_net.py as a user would run it: train, resume, evaluate, and be refused."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

from lambda_det.detection.data import make_shapes

pytestmark = pytest.mark.slow  # trains

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "train_net.py"

CONFIG = """
MODEL:
  META_ARCHITECTURE: GeneralizedRCNN
  DEVICE: cpu
  MASK_ON: True
  WEIGHTS: ""
  BACKBONE: {NAME: build_resnet_fpn_backbone, FREEZE_AT: 0}
  RESNETS: {DEPTH: 18, RES2_OUT_CHANNELS: 64, STEM_OUT_CHANNELS: 8, NORM: SyncBN,
            OUT_FEATURES: [res4, res5]}
  FPN: {IN_FEATURES: [res4, res5], OUT_CHANNELS: 8}
  ANCHOR_GENERATOR: {SIZES: [[16], [24], [32]], ASPECT_RATIOS: [[1.0]]}
  RPN: {IN_FEATURES: [p4, p5, p6], PRE_NMS_TOPK_TRAIN: 20, PRE_NMS_TOPK_TEST: 20,
        POST_NMS_TOPK_TRAIN: 10, POST_NMS_TOPK_TEST: 10, BATCH_SIZE_PER_IMAGE: 16}
  ROI_HEADS: {NAME: StandardROIHeads, IN_FEATURES: [p4, p5], BATCH_SIZE_PER_IMAGE: 8}
  ROI_BOX_HEAD: {NAME: FastRCNNConvFCHead, NUM_CONV: 1, CONV_DIM: 8, NUM_FC: 1, FC_DIM: 8,
                 POOLER_RESOLUTION: 7, NORM: naiveSyncBN_N}
  ROI_MASK_HEAD: {NAME: MaskRCNNConvUpsampleHead, NUM_CONV: 1, CONV_DIM: 8,
                  POOLER_RESOLUTION: 7, NORM: naiveSyncBN_N}
INPUT: {MIN_SIZE_TRAIN: [64], MAX_SIZE_TRAIN: 64, MIN_SIZE_TEST: 64, MAX_SIZE_TEST: 64}
DATALOADER: {NUM_WORKERS: 0}
SOLVER: {IMS_PER_BATCH: 2, BASE_LR: 0.01, MAX_ITER: 3, STEPS: [], WARMUP_ITERS: 0,
         CHECKPOINT_PERIOD: 2}
SEED: 1
"""

OTHER = ["MODEL.WEIGHTS", "{other}"]
LAMBDA = ["MODEL.BACKBONE.NAME", "build_lambda_resnet_fpn_backbone"]


def _write_squares(folder: Path, name: str, count: int, seed: int) -> None:
    """``count`` images of 64x64 with a bright square each, and COCO annotations without extras."""
    rng = np.random.default_rng(seed)
    (folder / name).mkdir()
    images, annotations = [], []
    for index in range(1, count + 1):
        image = rng.integers(0, 60, (64, 64, 3), dtype=np.uint8)
        side, x, y = int(rng.integers(16, 30)), *(int(v) for v in rng.integers(0, 34, 2))
        kind = int(rng.integers(0, 2))
        image[y : y + side, x : x + side, kind] = 230
        cv2.imwrite(str(folder / name / f"{index}.png"), image)
        images.append({"id": index, "file_name": f"{index}.png", "height": 64, "width": 64})
        corners = [x, y, x + side, y, x + side, y + side, x, y + side]
        annotations.append(
            {
                "id": index,
                "image_id": index,
                "category_id": 3 + kind,
                "bbox": [x, y, side, side],
                "area": side * side,
                "iscrowd": 0,
                "segmentation": [corners],
            }
        )
    categories = [{"id": 3, "name": "blue"}, {"id": 4, "name": "green"}]
    content = {"images": images, "annotations": annotations, "categories": categories}
    (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("squares")
    _write_squares(folder, "train", 8, seed=0)
    _write_squares(folder, "test", 3, seed=1)
    (folder / "tiny.yaml").write_text(CONFIG)
    result = ["--config-file", str(folder / "tiny.yaml")]
    for part in ("train", "test"):
        result += [f"--{part}-json", str(folder / f"{part}.json")]
        result += [f"--{part}-images", str(folder / part)]
    return result


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("train_net", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture(scope="module")
def trained(tool, flags, tmp_path_factory) -> Path:
    """The folder of a run of 3 steps; tests that change it resume it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert tool([*flags, "OUTPUT_DIR", str(folder)]) == 0
    return folder


def _no_connection(*_, **__):
    raise ConnectionError("no route to host")


def _iterations(folder: Path) -> list[int]:
    lines = (folder / "metrics.json").read_text().splitlines()
    return [json.loads(line)["iteration"] for line in lines]


def _snapshot(folder: Path) -> dict[str, bytes]:
    # Not the log: in these tests it stays open from one call of the tool to the next
    kept = [path for path in folder.iterdir() if path.suffix in (".pth", ".yaml", ".json")]
    return {path.name: path.read_bytes() for path in kept}


def test_a_run_leaves_all_it_should(trained):
    names = {p.name for p in trained.iterdir()}
    assert {"config.yaml", "log.txt", "metrics.json", "model_final.pth", "inference"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    state = torch.load(trained / "model_final.pth", weights_only=True)
    assert state["iteration"] == 2 and state["model"]


def test_the_same_folder_again_is_refused_and_untouched(tool, flags, trained, capsys):
    before = _snapshot(trained)
    assert tool([*flags, "OUTPUT_DIR", str(trained)]) == 2
    options = ["OUTPUT_DIR", str(trained), "MODEL.FPN.OUT_CHANNELS", "16"]
    assert tool([*flags, "--resume", *options]) == 2
    assert _snapshot(trained) == before
    first, second = capsys.readouterr().err.strip().splitlines()[-2:]
    assert first.startswith("error: OUTPUT_DIR") and "--resume" in first
    assert "MODEL.FPN.OUT_CHANNELS" in second


def test_resume_goes_on_where_it_stopped(tool, flags, trained):
    assert tool([*flags, "--resume", "OUTPUT_DIR", str(trained), "SOLVER.MAX_ITER", "5"]) == 0
    iterations = _iterations(trained)
    assert iterations == sorted(set(iterations)) and 4 in iterations
    state = torch.load(trained / "model_final.pth", weights_only=True)
    assert state["iteration"] == 4
    assert state["trainer"]["iteration"] == 4


def test_resume_with_another_number_of_images_per_step(tool, flags, tmp_path, capsys):
    argv = [*flags, "OUTPUT_DIR", str(tmp_path / "run"), "SOLVER.REFERENCE_WORLD_SIZE", "1"]
    assert tool([*argv, "SOLVER.MAX_ITER", "1", "DATASETS.TEST", "()"]) == 0
    config = (tmp_path / "run" / "config.yaml").read_text()
    assert tool([*flags, "--resume", *argv[len(flags) :], "SOLVER.ACCUMULATE_GRADIENTS", "2"]) == 2
    assert "takes 2 images a step" in capsys.readouterr().err
    assert (tmp_path / "run" / "config.yaml").read_text() == config
    # a run that is finished is evaluated once more, and stays as it is
    assert tool([*flags, "--resume", *argv[len(flags) :], "SOLVER.MAX_ITER", "1"]) == 0
    assert sorted(set(_iterations(tmp_path / "run"))) == _iterations(tmp_path / "run")


def test_resume_from_weights_alone_leaves_the_folder_as_it_was(tool, flags, trained, tmp_path):
    model = torch.load(trained / "model_final.pth", weights_only=True)["model"]
    torch.save({"model": model}, tmp_path / "bare.pth")
    (tmp_path / "last_checkpoint").write_text("bare.pth")
    assert tool([*flags, "--resume", "OUTPUT_DIR", str(tmp_path)]) == 2
    assert {path.name for path in tmp_path.iterdir()} == {"bare.pth", "last_checkpoint"}


def test_evaluation_alone(tool, flags, trained, tmp_path, capsys):
    weights = ["MODEL.WEIGHTS", str(trained / "model_final.pth")]
    config = (trained / "config.yaml").read_text()
    assert tool([*flags, "--eval-only", "OUTPUT_DIR", str(tmp_path / "a"), *weights]) == 0
    assert (tmp_path / "a" / "inference" / "coco_instances_results.json").exists()
    # the results of one run are not written over those of another
    before = _snapshot(trained)
    (tmp_path / "b.pth").write_bytes((trained / "model_final.pth").read_bytes())
    options = ["OUTPUT_DIR", str(trained), "MODEL.WEIGHTS", str(tmp_path / "b.pth")]
    assert tool([*flags, "--eval-only", *options]) == 2
    assert "give another OUTPUT_DIR" in capsys.readouterr().err
    assert _snapshot(trained) == before
    # nothing predicted, and the run's own configuration kept
    options = ["OUTPUT_DIR", str(trained), "MODEL.ROI_HEADS.SCORE_THRESH_TEST", "1.0"]
    assert tool([*flags, "--eval-only", "--resume", *options]) == 0
    assert (trained / "config.yaml").read_text() == config


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--eval-only"], "needs weights"),
        (["--eval-only", "--resume"], "holds none"),
        (["MODEL.WEIGHTS", "nowhere.pth"], "nowhere.pth is not there"),
        (OTHER, "Nothing of the backbone"),
        (["--eval-only", *OTHER], "fpn_lateral4.bias is missing"),
        (["MODEL.BACKBONE.NAME", "build_resnet_fpn"], "did you mean build_resnet_fpn_backbone"),
        ([*LAMBDA, "MODEL.LAMBDA_RESNET.SCOPE", "6"], "odd"),
        (["--eval-only", *OTHER, *LAMBDA, "MODEL.LAMBDA_RESNET.HEADS", "7"], "7 heads"),
        ([*LAMBDA, "MODEL.LAMBDA_RESNET.NAME", "lambda_resnet51"], "lambda_resnet50"),
        ([*LAMBDA, "MODEL.LAMBDA_RESNET.IMPLEMENTATION", "quick"], "quick"),
        ([*LAMBDA, "MODEL.LAMBDA_RESNET.OUT_FEATURES", "['res6']"], "res6"),
        (["SOLVER.IMS_PER_BATCH", "3", "SOLVER.ACCUMULATE_GRADIENTS", "2"], "2 or 4 images"),
        (["SOLVER.AMP.ENABLED", "True", "SOLVER.AMP.DTYPE", "float16"], "needs a CUDA device"),
        (["SOLVER.CHECKPOINT_PERIOD", "0"], "SOLVER.CHECKPOINT_PERIOD is 0"),
        (["SOLVER.NO_SUCH", "1"], "SOLVER.NO_SUCH"),
        (["--num-gpus", "0"], "--num-gpus is 0"),
        (["--num-machines", "2", "--num-gpus", "1"], "--dist-url"),
        (["MODEL.DEVICE", "gpu"], "'gpu' is no device"),
        (["MODEL.WEIGHTS", "timm://resnetrs10l"], "timm://resnetrs101"),
        (["MODEL.WEIGHTS", "timm://resnetrs50.tf_in1k"], "timm/resnetrs50.tf_in1k.safetensors"),
        (["EVENT_WRITERS", "['no.such.Writer']"], "EVENT_WRITERS names 'no.such.Writer'"),
        (["--val-share", "0.5"], "--test-json"),
        (["--epochs", "-1"], "RECIPE.EPOCHS"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tool, flags, tmp_path, capsys, monkeypatch, arguments, words
):
    monkeypatch.setenv("FVCORE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.hf_hub_download", _no_connection)
    folder, other = tmp_path / "run", tmp_path / "other.pth"
    torch.save({"model": {"a.weight": torch.zeros(1)}}, other)
    arguments = [a.replace("{other}", str(other)) for a in arguments]
    pairs = next((i for i, a in enumerate(arguments) if a[0].isupper()), len(arguments))
    argv = [*flags, *arguments[:pairs], "OUTPUT_DIR", str(folder), *arguments[pairs:]]
    assert tool(argv) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ") and words in last
    assert not folder.exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_asked_for_and_not_there(tool, flags, tmp_path, capsys):
    assert tool([*flags, "MODEL.DEVICE", "cuda", "OUTPUT_DIR", str(tmp_path / "run")]) == 2
    assert "MODEL.DEVICE cpu" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()


def test_bfloat16_accumulation_and_precise_batch_norm(tool, flags, tmp_path):
    options = "SOLVER.AMP.ENABLED True SOLVER.AMP.DTYPE bfloat16 SOLVER.IMS_PER_BATCH 4 "
    options += "SOLVER.ACCUMULATE_GRADIENTS 2 "
    options += "TEST.PRECISE_BN.ENABLED True TEST.PRECISE_BN.NUM_ITER 2 SOLVER.MAX_ITER 2"
    assert tool([*flags, "OUTPUT_DIR", str(tmp_path / "run"), *options.split()]) == 0


def test_divergence_names_the_last_checkpoint(tool, flags, tmp_path, capsys):
    folder = tmp_path / "run"
    options = ["SOLVER.BASE_LR", "1e15", "SOLVER.CHECKPOINT_PERIOD", "1", "SOLVER.MAX_ITER", "9"]
    assert tool([*flags, "OUTPUT_DIR", str(folder), *options]) == 2
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert "not finite" in last or "Inf/NaN" in last  # the second in Detectron2's proposals
    named = folder / (folder / "last_checkpoint").read_text()
    assert str(named) in last
    weights = torch.load(named, weights_only=True)["model"].values()
    assert all(w.isfinite().all() for w in weights)


def test_a_lambda_resnet_is_trained_evaluated_and_resumed(tool, tmp_path):
    """All that the paper's configurations switch on, at 64 pixels and on the CPU."""
    make_shapes(tmp_path, num_train=8, num_val=2, size=64)
    flags = ["--config-file", str(ROOT / "configs" / "quick" / "shapes_lambdaresnet26_slim.yaml")]
    for part, split in (("train", "train"), ("test", "val")):
        annotations = tmp_path / "shapes" / "annotations" / f"instances_{split}.json"
        flags += [f"--{part}-json", str(annotations)]
        flags += [f"--{part}-images", str(tmp_path / "shapes" / split)]
    options = "INPUT.LSJ.ENABLED True INPUT.LSJ.SIZE 64 INPUT.MIN_SIZE_TEST 64 "
    options += "SOLVER.AMP.ENABLED True SOLVER.AMP.DTYPE bfloat16 SOLVER.IMS_PER_BATCH 4 "
    options += "SOLVER.ACCUMULATE_GRADIENTS 2 MODEL.LAMBDA_RESNET.MASK_PADDING True "
    options += "SOLVER.STEPS () SOLVER.WARMUP_ITERS 0"
    folder = tmp_path / "run"
    argv = [*options.split(), "OUTPUT_DIR", str(folder), "SOLVER.MAX_ITER"]
    assert tool([*flags, *argv, "2"]) == 0
    before = torch.load(folder / "model_final.pth", weights_only=True)
    assert before["iteration"] == 1
    records = [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]
    assert any("bbox/AP" in record and "segm/AP" in record for record in records)
    assert tool([*flags, "--resume", *argv, "3"]) == 0
    after = torch.load(folder / "model_final.pth", weights_only=True)
    assert after["iteration"] == 2
    changed = [k for k, v in after["model"].items() if not torch.equal(v, before["model"][k])]
    assert any("position" in key for key in changed)
    assert all(value.isfinite().all() for value in after["model"].values())
