"""``lambda-det train`` as a user would run it, of YAML and of a LazyConfig: train, be killed,
resume, evaluate, and be refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from lambda_det import cli
from tests.detection.tiny import NARROW, TINY, write_lazy_config
from tests.shapes import data_words

pytestmark = pytest.mark.slow  # trains

# By what the tests call it: the key of YAML files, and that of LazyConfigs
KEYS = {
    "accumulate": ("SOLVER.ACCUMULATE_GRADIENTS", "train.accumulate_gradients"),
    "device": ("MODEL.DEVICE", "train.device"),
    "images": ("SOLVER.IMS_PER_BATCH", "dataloader.train.total_batch_size"),
    "network": ("MODEL.LAMBDA_RESNET.NAME", "model.backbone.bottom_up.name"),
    "norm": ("MODEL.FPN.NORM", "model.backbone.norm"),
    "output": ("OUTPUT_DIR", "train.output_dir"),
    "period": ("SOLVER.CHECKPOINT_PERIOD", "train.checkpointer.period"),
    "rate": ("SOLVER.BASE_LR", "optimizer.lr"),
    "steps": ("SOLVER.MAX_ITER", "train.max_iter"),
    "weights": ("MODEL.WEIGHTS", "train.init_checkpoint"),
    "world": ("SOLVER.REFERENCE_WORLD_SIZE", "train.reference_world_size"),
}


# Few proposals
FEW = (
    "MODEL.RPN.PRE_NMS_TOPK_TRAIN 50 MODEL.RPN.POST_NMS_TOPK_TRAIN 20 "
    "MODEL.RPN.PRE_NMS_TOPK_TEST 50 MODEL.RPN.POST_NMS_TOPK_TEST 20",
    "model.proposal_generator.pre_nms_topk=[50,50] model.proposal_generator.post_nms_topk=[20,20]",
)


class Kind(NamedTuple):
    """A way to describe a training.

    Attributes:
        index: of its keys.
        flags: the file, and the flags that name data.
        options: that make it small.
    """

    index: int
    flags: list[str]
    options: list[str]

    def pairs(self, **values: object) -> list[str]:
        """Keys and values as they stand at the end of a command line."""
        pairs = [(KEYS[name][self.index], str(value)) for name, value in values.items()]
        return ["=".join(p) for p in pairs] if self.index else [w for p in pairs for w in p]

    def words(self, *flags: str, **values: object) -> list[str]:
        return [*self.flags, *flags, *self.options, *self.pairs(**values)]

    def train(self, *flags: str, **values: object) -> int:
        return cli.main(["train", *self.words(*flags, **values)])

    def key(self, name: str) -> str:
        return KEYS[name][self.index]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> list[str]:
    """The flags that name a small data set of shapes."""
    return data_words(tmp_path_factory.mktemp("shapes"), num_train=8, num_val=2, size=64)


@pytest.fixture(scope="module", params=["yaml", "py"])
def kind(request, data, tmp_path_factory) -> Kind:
    index = request.param == "py"
    flags = ["--config", "mask_rcnn_lambdaresnet50.yaml", *data]
    if index:
        flags = ["--config", str(write_lazy_config(Path(data[1]).parents[2]))]
    result = Kind(index, flags, [*TINY[index].split(), *NARROW[index].split(), *FEW[index].split()])
    small = result.pairs(
        images=2, world=0, steps=3, period=2, rate=0.01, network="resnet14_slim_lambda_c5"
    )
    return result._replace(options=[*result.options, *small])


@pytest.fixture(scope="module")
def trained(kind, tmp_path_factory) -> Path:
    """The folder of a run of 3 steps; tests that change it resume it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert kind.train(output=folder) == 0
    return folder


@pytest.fixture
def last_error(capsys) -> Callable[[], str]:
    def last_error() -> str:
        last = capsys.readouterr().err.strip().splitlines()[-1]
        assert last.startswith("error: ")
        return last

    return last_error


def _lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.json").read_text().splitlines()]


def _losses(folder: Path) -> dict[str, float]:
    """The losses of the third step."""
    [line] = [r for r in _lines(folder) if r["iteration"] == 2 and "total_loss" in r]
    return {name: value for name, value in line.items() if "loss" in name}


def _snapshot(folder: Path) -> dict[str, bytes]:
    # Not the log: in these tests it stays open from one call of the command to the next
    kept = [path for path in folder.iterdir() if path.suffix in (".pth", ".yaml", ".json")]
    return {path.name: path.read_bytes() for path in kept}


def test_a_run_leaves_all_it_should(trained):
    names = {p.name for p in trained.iterdir()}
    assert {"config.yaml", "log.txt", "metrics.json", "model_final.pth", "inference"} <= names
    assert any(name.startswith("events.out.tfevents") for name in names)
    assert any("bbox/AP" in line and "segm/AP" in line for line in _lines(trained))


@pytest.mark.parametrize("kind", ["py"], indirect=True)
def test_the_saved_configuration_is_the_run_again(kind, trained, tmp_path):
    """config.yaml says all that the file, the command line and the data flags said."""
    words = ["--config", str(trained / "config.yaml"), "--output", str(tmp_path / "again")]
    assert cli.main(["train", *words, *kind.pairs(steps=3)]) == 0
    assert _losses(tmp_path / "again") == _losses(trained)


def test_the_same_folder_again_is_refused_and_untouched(kind, trained, last_error):
    before = _snapshot(trained)
    assert kind.train(output=trained) == 2
    last = last_error()
    assert "--output" in last and "--resume" in last
    assert kind.train("--resume", output=trained, norm="BN") == 2
    assert kind.key("norm") in last_error()
    assert _snapshot(trained) == before


def test_evaluation_alone(kind, trained, tmp_path, last_error):
    weights = trained / "model_final.pth"
    assert kind.train("--eval-only", output=tmp_path / "a", weights=weights) == 0
    assert (tmp_path / "a" / "inference" / "coco_instances_results.json").exists()
    # the results of one run are not written over those of another
    before = _snapshot(trained)
    (tmp_path / "b.pth").write_bytes(weights.read_bytes())
    assert kind.train("--eval-only", output=trained, weights=tmp_path / "b.pth") == 2
    assert "another --output" in last_error()
    assert _snapshot(trained) == before


OTHER = {"weights": "{other}"}


# Where the sentence names a key, it is that of the file's kind
REFUSED = [
    (["--eval-only"], {}, "{weights}"),
    ([], {"weights": "nowhere.pth"}, "nowhere.pth cannot be read"),
    ([], {"images": 3, "accumulate": 2}, "{images}"),
]
REFUSED_ALIKE = [
    (["--eval-only", "--resume"], {}, "holds none"),
    ([], OTHER, "does not hold this backbone"),
    (["--eval-only"], OTHER, "is missing"),
    ([], {"network": "lambda_resnet51"}, "lambda_resnet50"),
    ([], {"device": "gpu"}, "'gpu' is no device"),
    (["--num-gpus", "0"], {}, "--num-gpus is 0"),
    (["--num-machines", "2"], {}, "--dist-url"),
]


@pytest.mark.parametrize(
    ("kind", "flags", "values", "words"),
    [
        *((kind, *row) for kind in ("yaml", "py") for row in REFUSED),
        *(("yaml", *row) for row in REFUSED_ALIKE),
    ],
    indirect=["kind"],
)
def test_what_cannot_work_is_refused_before_anything_is_written(
    kind, tmp_path, last_error, flags, values, words
):
    folder, other = tmp_path / "run", tmp_path / "other.pth"
    torch.save({"model": {"a.weight": torch.zeros(1)}}, other)
    values = {name: str(value).format(other=other) for name, value in values.items()}
    assert kind.train(*flags, output=folder, **values) == 2
    assert words.format(**{name: kind.key(name) for name in KEYS}) in last_error()
    assert not folder.exists()


@pytest.mark.parametrize("kind", ["yaml"], indirect=True)
def test_divergence_names_the_last_checkpoint(kind, tmp_path, last_error):
    folder = tmp_path / "run"
    words = kind.words(output=folder, rate=1e15, period=1, steps=9)
    assert cli.main(["train", *words, "SOLVER.WARMUP_ITERS", "0"]) == 2
    last = last_error()
    named = folder / (folder / "last_checkpoint").read_text()
    assert str(named) in last
    weights = torch.load(named, weights_only=True)["model"].values()
    assert all(w.isfinite().all() for w in weights)


# Nothing of lambda_det in it; an own head, and keys that nobody here knows
FOREIGN = """
from pathlib import Path

import detectron2
from detectron2.config import LazyConfig
from detectron2.data.datasets import register_coco_instances
from detectron2.layers import ShapeSpec
from detectron2.modeling.meta_arch.retinanet import RetinaNetHead


class MyHead(RetinaNetHead):
    def __init__(self, temperature, **options):
        super().__init__(**options)
        self.temperature = temperature

    def forward(self, features):
        logits, boxes = super().forward(features)
        return [x / self.temperature for x in logits], boxes


try:
    register_coco_instances("mine", {}, @JSON@, @IMAGES@)
except AssertionError:
    pass  # a second reading in one process
nodes = Path(detectron2.__file__).parent / "model_zoo" / "configs" / "common"
model = LazyConfig.load(str(nodes / "models" / "retinanet.py")).model
dataloader = LazyConfig.load(str(nodes / "data" / "coco.py")).dataloader
train = LazyConfig.load(str(nodes / "train.py")).train
optimizer = LazyConfig.load(str(nodes / "optim.py")).AdamW
lr_multiplier = LazyConfig.load(str(nodes / "coco_schedule.py")).lr_multiplier_1x

model.head._target_, model.head.temperature = MyHead, 2.0
model.num_classes = 3
model.backbone.bottom_up.freeze_at = 0
model.backbone.bottom_up.stages.depth = 18
del model.backbone.bottom_up.stages.stride_in_1x1
model.backbone.top_block.in_channels = 512
model.backbone.out_channels = 16
model.head.input_shape = [ShapeSpec(channels=16)] * 5
model.head.conv_dims = [16]
dataloader.train.mapper.use_instance_mask = False
dataloader.train.mapper.augmentations = dataloader.test.mapper.augmentations = []
dataloader.train.total_batch_size = 2
dataloader.train.num_workers = dataloader.test.num_workers = 0
dataloader.train.dataset.names = dataloader.test.dataset.names = "mine"
dataloader.train.collate_fn = lambda batch: batch  # YAML cannot hold it
dataloader.evaluator.output_dir = "${train.output_dir}/found"
train.device = "cpu"
train.max_iter = 2
train.wandb = dict(enabled=False, project="mine")
train.fast_dev_run = True
"""


def test_a_foreign_lazy_config(data, tmp_path):
    """A RetinaNet with a head of its own, which knows nothing of lambda_det."""
    file, folder = tmp_path / "foreign.py", tmp_path / "run"
    file.write_text(FOREIGN.replace("@JSON@", repr(data[1])).replace("@IMAGES@", repr(data[3])))
    words = ["train", "--config", str(file), "--output", str(folder)]
    assert cli.main(words) == 0
    text = (folder / "config.yaml").read_text()
    assert "MyHead" in text and "temperature: 2.0" in text
    assert "train.fast_dev_run, train.wandb" in (folder / "log.txt").read_text()
    assert cli.main([*words, "--resume", "train.max_iter=3"]) == 0
    state = torch.load(folder / "model_final.pth", weights_only=True)
    assert state["iteration"] == 2
    assert (folder / "found" / "coco_instances_results.json").exists()
