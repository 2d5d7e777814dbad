"""tools/lazyconfig_train_net.py as a user would run it: train, be killed, resume, evaluate."""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path

import pytest
import torch
from detectron2.config import LazyConfig

from lambda_det.detection.data import make_shapes
from tests import forked

pytestmark = pytest.mark.slow  # trains

ROOT = Path(__file__).parents[2]
TOOL = ROOT / "tools" / "lazyconfig_train_net.py"

# Somebody's LazyConfig: Detectron2's nodes, with our backbone and loaders taken into it
CONFIG = """
import lambda_det
from detectron2.layers import ShapeSpec

base = lambda_det.get_config("mask_rcnn_lambdaresnet50.py")
model, dataloader, optimizer, lr_multiplier = (
    base.model, base.dataloader, base.optimizer, base.lr_multiplier
)
train = base.train
del base

model.backbone.bottom_up.name = "lambda_resnet26_slim"
model.backbone.bottom_up.scope = 7
model.backbone.bottom_up.out_features = ["res4", "res5"]
model.backbone.out_channels = 8
rpn, heads = model.proposal_generator, model.roi_heads
rpn.in_features = ["p4", "p5", "p6"]
rpn.head.in_channels = 8
rpn.head.conv_dims = [-1]
rpn.anchor_generator.sizes = [[16], [24], [32]]
rpn.anchor_generator.strides = [16, 32, 64]
rpn.pre_nms_topk = (20, 20)
rpn.post_nms_topk = (10, 10)
heads.batch_size_per_image = 8
heads.box_in_features = heads.mask_in_features = ["p4", "p5"]
heads.box_pooler.scales = heads.mask_pooler.scales = [1 / 16, 1 / 32]
heads.box_head.input_shape = ShapeSpec(channels=8, height=7, width=7)
heads.box_head.conv_dims = [8]
heads.box_head.fc_dims = [8]
heads.box_predictor.input_shape = ShapeSpec(channels=8)
heads.mask_head.input_shape = ShapeSpec(channels=8, height=14, width=14)
heads.mask_head.conv_dims = [8, 8]
del rpn, heads

dataloader.image_size = 64
dataloader.train.num_workers = dataloader.test.num_workers = 0
dataloader.train.total_batch_size = 2
optimizer.lr = 0.01
train.device = "cpu"
train.seed = 1
train.max_iter = 3
train.checkpointer.period = 2
train.reference_world_size = 0
"""

# Nothing of lambda_det in it, and keys that nobody here knows, switched off
FOREIGN = """
from pathlib import Path

import detectron2
from detectron2.config import LazyConfig

nodes = Path(detectron2.__file__).parent / "model_zoo" / "configs" / "common"
retinanet = LazyConfig.load(str(nodes / "models" / "retinanet.py"))
model = retinanet.model
dataloader = LazyConfig.load(str(nodes / "data" / "coco.py")).dataloader
train = LazyConfig.load(str(nodes / "train.py")).train
optimizer = LazyConfig.load(str(nodes / "optim.py")).AdamW
del retinanet

model.backbone.bottom_up.freeze_at = 0
model.backbone.bottom_up.stages.depth = 18
del model.backbone.bottom_up.stages.stride_in_1x1
model.backbone.bottom_up.stages.norm = model.backbone.bottom_up.stem.norm = "BN"
model.backbone.bottom_up.out_features = ["res3", "res4", "res5"]
model.backbone.top_block.in_channels = 512
lr_multiplier = LazyConfig.load(str(nodes / "coco_schedule.py")).lr_multiplier_1x
dataloader.train.mapper.use_instance_mask = False
dataloader.train.mapper.augmentations = dataloader.test.mapper.augmentations = []
dataloader.train.total_batch_size = 2
dataloader.train.num_workers = dataloader.test.num_workers = 0
train.device = "cpu"
train.max_iter = 2
train.wandb = dict(enabled=False, project="mine")
train.amp.cache = False
train.clip_grad = None
dataloader.train.collate_fn = lambda batch: batch  # YAML cannot hold it
"""


@pytest.fixture(scope="module")
def flags(tmp_path_factory) -> list[str]:
    folder = tmp_path_factory.mktemp("shapes")
    make_shapes(folder, num_train=8, num_val=2, size=64)
    (folder / "tiny.py").write_text(CONFIG)
    (folder / "foreign.py").write_text(FOREIGN)
    result = ["--config-file", str(folder / "tiny.py")]
    for part, split in (("train", "train"), ("test", "val")):
        annotations = folder / "shapes" / "annotations" / f"instances_{split}.json"
        result += [f"--{part}-json", str(annotations)]
        result += [f"--{part}-images", str(folder / "shapes" / split)]
    return result


@pytest.fixture(scope="module")
def tool():
    spec = importlib.util.spec_from_file_location("lazyconfig_train_net", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.main


@pytest.fixture(scope="module")
def trained(tool, flags, tmp_path_factory) -> Path:
    """The folder of a run of 3 steps; tests that change it resume it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert tool([*flags, f"train.output_dir={folder}"]) == 0
    return folder


def _iterations(folder: Path) -> list[int]:
    lines = (folder / "metrics.json").read_text().splitlines()
    return [json.loads(line)["iteration"] for line in lines]


def _losses(folder: Path) -> dict[str, float]:
    """The losses of the third step."""
    lines = map(json.loads, (folder / "metrics.json").read_text().splitlines())
    [record] = [line for line in lines if line["iteration"] == 2 and "total_loss" in line]
    return {name: value for name, value in record.items() if "loss" in name}


def _snapshot(folder: Path) -> dict[str, bytes]:
    kept = [path for path in folder.iterdir() if path.suffix in (".pth", ".yaml", ".json")]
    return {path.name: path.read_bytes() for path in kept}


def _last_error(capsys) -> str:
    last = capsys.readouterr().err.strip().splitlines()[-1]
    assert last.startswith("error: ")
    return last


def test_a_run_leaves_all_it_should(trained):
    names = {p.name for p in trained.iterdir()}
    assert {"config.yaml", "log.txt", "metrics.json", "model_final.pth", "inference"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    records = [json.loads(line) for line in (trained / "metrics.json").read_text().splitlines()]
    assert any("bbox/AP" in record and "segm/AP" in record for record in records)
    state = torch.load(trained / "model_final.pth", weights_only=True)
    assert state["iteration"] == 2 and state["trainer"]["images_per_step"] == 2


def test_the_saved_configuration_is_the_run_again(tool, trained, tmp_path):
    """config.yaml says all that the file, the command line and the data flags said."""
    saved = LazyConfig.load(str(trained / "config.yaml"))
    assert saved.model.roi_heads.num_classes == 3
    assert saved.model.backbone.bottom_up._target_ == "lambda_det.create_backbone"
    argv = ["--config-file", str(trained / "config.yaml"), "train.max_iter=3"]
    assert tool([*argv, f"train.output_dir={tmp_path / 'again'}"]) == 0
    assert _losses(tmp_path / "again") == _losses(trained)


def test_the_same_folder_again_is_refused_and_untouched(tool, flags, trained, capsys):
    before = _snapshot(trained)
    run = f"train.output_dir={trained}"
    assert tool([*flags, run]) == 2
    last = _last_error(capsys)
    assert "train.output_dir" in last and "--resume" in last and "OUTPUT_DIR" not in last
    for change in ("model.backbone.norm=BN", "optimizer.weight_decay=0.1"):
        assert tool([*flags, "--resume", run, change]) == 2
        assert change.partition("=")[0] in _last_error(capsys)
    assert _snapshot(trained) == before


def test_resume_goes_on_where_it_stopped(tool, flags, trained):
    argv = [*flags, "--resume", f"train.output_dir={trained}", "train.max_iter=5"]
    assert tool(argv) == 0
    iterations = _iterations(trained)
    assert iterations == sorted(set(iterations)) and 4 in iterations
    state = torch.load(trained / "model_final.pth", weights_only=True)
    assert state["iteration"] == 4 and state["trainer"]["iteration"] == 4


def test_a_killed_run_is_resumed_and_evaluated(tool, flags, tmp_path):
    """By SIGKILL once a checkpoint is there."""
    folder = tmp_path / "run"
    argv = [*flags, f"train.output_dir={folder}", "train.checkpointer.period=1"]
    process = forked.start([TOOL, *argv, "train.max_iter=100000"], tmp_path / "printed")
    try:
        until = time.monotonic() + 300
        while not (folder / "last_checkpoint").exists() and time.monotonic() < until:
            assert process.is_alive(), (tmp_path / "printed").read_text()
            time.sleep(0.1)
    finally:
        process.kill()
        process.join()
    last = torch.load(folder / (folder / "last_checkpoint").read_text(), weights_only=True)
    steps = last["iteration"] + 3
    assert tool([*flags, "--resume", *argv[len(flags) :], f"train.max_iter={steps}"]) == 0
    state = torch.load(folder / "model_final.pth", weights_only=True)
    assert state["iteration"] == steps - 1
    assert tool([*flags, "--resume", "--eval-only", *argv[len(flags) :]]) == 0


def test_evaluation_alone(tool, flags, trained, tmp_path, capsys):
    weights = f"train.init_checkpoint={trained / 'model_final.pth'}"
    assert tool([*flags, "--eval-only", f"train.output_dir={tmp_path / 'a'}", weights]) == 0
    assert (tmp_path / "a" / "inference" / "coco_instances_results.json").exists()
    before = _snapshot(trained)
    (tmp_path / "b.pth").write_bytes((trained / "model_final.pth").read_bytes())
    weights = f"train.init_checkpoint={tmp_path / 'b.pth'}"
    assert tool([*flags, "--eval-only", f"train.output_dir={trained}", weights]) == 2
    assert "another train.output_dir" in _last_error(capsys)
    assert _snapshot(trained) == before


def test_a_foreign_configuration(tool, flags, tmp_path):
    """RetinaNet out of Detectron2's nodes, which knows nothing of lambda_det."""
    foreign = [flags[0], str(Path(flags[1]).with_name("foreign.py")), *flags[2:]]
    folder = tmp_path / "run"
    assert tool([*foreign, f"train.output_dir={folder}"]) == 0
    assert "num_classes: 3" in (folder / "config.yaml").read_text()
    assert tool([*foreign, "--resume", f"train.output_dir={folder}", "train.max_iter=3"]) == 0
    assert (folder / "inference" / "coco_instances_results.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--eval-only"], "add train.init_checkpoint=FILE at the end"),
        (["--eval-only", "--resume"], "holds none"),
        (["train.init_checkpoint=nowhere.pth"], "train.init_checkpoint nowhere.pth is not there"),
        (["train.init_checkpoint={other}"], "Nothing of the backbone"),
        (["model.backbone.bottom_up.scope=6"], "odd"),
        (["model.backbone.bottom_up.name=lambda_resnet51"], "lambda_resnet50"),
        (["model.backbone.bottom_up.nmae=a"], "unexpected keyword argument 'nmae'"),
        (["model.backbone.bottom_up.out_features=[res6]"], "res6"),
        (["model.bakbone.norm=BN"], "did you mean model.backbone.norm"),
        (["train.max_itr=5"], "did you mean train.max_iter"),
        (["+train.acumulate_gradients=2"], "did you mean train.accumulate_gradients"),
        (["+train.wandb={project: mine}"], "train.wandb=null"),
        (["+train.amp.cache=True"], "train.amp.cache"),
        (["train.max_iter=many"], "train.max_iter is 'many'; it must be of type int"),
        (["model._target_=nowhere.Model"], "nowhere"),
        (["SOLVER.MAX_ITER", "5"], "not key=value"),
        (["optimizer.momentun=1"], "optimizer cannot be made"),
        (
            ["dataloader.train.total_batch_size=3", "train.accumulate_gradients=2"],
            "dataloader.train.total_batch_size 3 does not divide",
        ),
        (["train.amp.dtype=float16"], "train.amp.dtype=float16 needs a CUDA device"),
        (["train.device=gpu"], "'gpu' is no device"),
        (["--num-gpus", "0"], "train.device=cpu at the end"),
        (["--train-json", "nowhere.json"], "nowhere.json"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    tool, flags, tmp_path, capsys, arguments, words
):
    folder, other = tmp_path / "run", tmp_path / "other.pth"
    torch.save({"model": {"a.weight": torch.zeros(1)}}, other)
    arguments = [a.replace("{other}", str(other)) for a in arguments]
    pairs = next(
        (i for i, a in enumerate(arguments) if "." in a and not a.endswith("json")), len(arguments)
    )
    argv = [*flags, *arguments[:pairs], f"train.output_dir={folder}", *arguments[pairs:]]
    assert tool(argv) == 2
    assert words in _last_error(capsys)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = [", "SyntaxError"),
        ("raise RuntimeError('no luck')", "no luck"),
        ("train = dict(max_iter=1)", "no model"),
    ],
)
def test_a_file_that_is_no_configuration(tool, tmp_path, capsys, text, words):
    file = tmp_path / "file.py"
    file.write_text(text)
    assert tool(["--config-file", str(file)]) == 2
    assert words in _last_error(capsys)
    assert tool(["--config-file", str(tmp_path / "fil.py")]) == 2
    assert "file.py" in _last_error(capsys)


def test_bfloat16_accumulation_and_precise_batch_norm(tool, flags, tmp_path):
    options = "train.amp.enabled=True train.amp.dtype=bfloat16 "
    options += "train.accumulate_gradients=2 train.max_iter=2 "
    options += "dataloader.train.total_batch_size=4 train.precise_bn.enabled=True "
    options += "train.precise_bn.num_iter=2"
    assert tool([*flags, f"train.output_dir={tmp_path / 'run'}", *options.split()]) == 0


def test_divergence_names_the_last_checkpoint(tool, flags, tmp_path, capsys):
    folder = tmp_path / "run"
    options = ["optimizer.lr=1e15", "train.checkpointer.period=1", "train.max_iter=9"]
    options.append("lr_multiplier.warmup_length=0.0")
    assert tool([*flags, f"train.output_dir={folder}", *options]) == 2
    last = _last_error(capsys)
    assert "optimizer.lr" in last and "SOLVER" not in last
    assert str(folder / (folder / "last_checkpoint").read_text()) in last


def test_processes_make_one_run(flags, tmp_path):
    folder = tmp_path / "run"
    argv = [TOOL, *flags, f"train.output_dir={folder}", "train.max_iter=1"]
    for done in forked.run_as_torchrun(argv, tmp_path):
        assert done.returncode == 0, done.stdout[-3000:]
    assert "Process 0 of 2" in (folder / "log.txt").read_text()
    assert _iterations(folder).count(0) == 1
