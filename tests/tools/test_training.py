"""``lambda-det train`` as a user would run it: trained, evaluated and refused, by a YAML file; and
LazyConfigs, of ours and of others.
"""

import pytest
import torch

from lambda_det import cli
from tests.reliability.runs import lazy_words, metrics

pytestmark = pytest.mark.slow  # trains


def test_the_saved_configuration_is_the_run_again(tmp_path, last_error):
    """A LazyConfig's config.yaml says all that the file and the command line said."""
    one, two = tmp_path / "one", tmp_path / "two"
    words = [*lazy_words(tmp_path), f"train.output_dir={one}", "train.max_iter=3"]
    words += ["model.backbone.bottom_up.name=resnet14_slim_lambda_c5"]
    assert cli.main(["train", *words]) == 0
    again = ["--config", str(one / "config.yaml"), "--output", str(two)]
    assert cli.main(["train", *again]) == 0
    assert metrics(one) == metrics(two) and len(metrics(one)) == 3
    assert cli.main(["train", *again, "--resume", "model.backbone.norm=BN"]) == 2
    assert "model.backbone.norm" in last_error()


def test_evaluation_alone(train, trained, tmp_path, last_error):
    weights, other = trained / "model_final.pth", tmp_path / "b.pth"
    assert train(tmp_path / "a", "--eval-only", "MODEL.WEIGHTS", weights) == 0
    assert (tmp_path / "a" / "inference" / "coco_instances_results.json").exists()
    # the results of one run are not written over those of another
    kept = [path for path in trained.iterdir() if path.suffix in (".pth", ".yaml", ".json")]
    before = [path.read_bytes() for path in kept]
    other.write_bytes(weights.read_bytes())
    assert train(trained, "--eval-only", "MODEL.WEIGHTS", other) == 2
    assert "another --output" in last_error()
    assert [path.read_bytes() for path in kept] == before


# The words, and what is named
REFUSED = {
    "--eval-only": "MODEL.WEIGHTS",
    "MODEL.WEIGHTS nowhere.pth": "nowhere.pth cannot be read",
    "SOLVER.IMS_PER_BATCH 3 SOLVER.ACCUMULATE_GRADIENTS 2": "SOLVER.IMS_PER_BATCH",
    "--eval-only --resume": "holds none",
    "MODEL.WEIGHTS {other}": "does not hold this backbone",
    "--eval-only MODEL.WEIGHTS {other}": "is missing",
    "MODEL.LAMBDA_RESNET.NAME lambda_resnet51": "lambda_resnet50",
    "MODEL.DEVICE gpu": "'gpu' is no device",
    "--num-gpus 0": "--num-gpus is 0",
    "--num-machines 2": "--dist-url",
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_cannot_work_is_refused_before_anything_is_written(train, tmp_path, last_error, words):
    folder, other = tmp_path / "run", tmp_path / "other.pth"
    torch.save({"model": {"a.weight": torch.zeros(1)}}, other)
    assert train(folder, *words.format(other=other).split()) == 2
    assert REFUSED[words] in last_error()
    assert not folder.exists()


def test_divergence_names_the_last_checkpoint(train, tmp_path, last_error):
    folder = tmp_path / "run"
    words = "SOLVER.BASE_LR 1e15 SOLVER.WARMUP_ITERS 0 SOLVER.CHECKPOINT_PERIOD 1 SOLVER.MAX_ITER 9"
    assert train(folder, *words.split()) == 2
    named = folder / (folder / "last_checkpoint").read_text()
    assert str(named) in last_error()
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
