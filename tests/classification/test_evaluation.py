import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lambda_det.classification.evaluation import evaluate_accuracy
from lambda_det.training.precision import Precision

FLOAT32 = Precision("cpu", None)


class Scores(nn.Module):
    """Gives the scores that a batch holds."""

    def forward(self, batch):
        assert not self.training
        return batch["images"]


class Opposite(Scores):
    def forward(self, batch):
        return -super().forward(batch)


def _batches(sizes, classes):
    for size in sizes:
        yield {"images": torch.randn(size, classes), "labels": torch.randint(classes, (size,))}


@pytest.mark.parametrize("classes", [3, 10])
def test_counts_are_exact_in_batches_of_any_size(classes):
    batches = list(_batches((7, 1, 4), classes))
    accuracy = evaluate_accuracy({"raw": Scores().train()}, batches, FLOAT32)
    first = in_five = loss = 0
    for batch in batches:
        for scores, label in zip(batch["images"], batch["labels"], strict=True):
            rank = (scores > scores[label]).sum()
            first += rank == 0
            in_five += rank < 5
            loss += -F.log_softmax(scores.double(), 0)[label]
    assert accuracy["raw_top1"] == pytest.approx(100 * first.item() / 12)
    assert accuracy["raw_top5"] == pytest.approx(100 * in_five.item() / 12)
    assert accuracy["raw_loss"] == pytest.approx(loss.item() / 12)


def test_several_models_see_every_image_once():
    batches = list(_batches((7, 4), 6))
    read = []
    loader = (read.append(len(batch["labels"])) or batch for batch in batches)
    models = {"raw": Scores(), "averaged": Opposite()}
    both = evaluate_accuracy(models, loader, FLOAT32)
    assert read == [7, 4]
    alone = [evaluate_accuracy({name: model}, batches, FLOAT32) for name, model in models.items()]
    assert both == alone[0] | alone[1] and both["raw_loss"] != both["averaged_loss"]
