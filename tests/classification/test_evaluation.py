import pytest
import torch
from torch import nn
from torch.nn import functional as F

from lambda_det.classification.evaluation import evaluate_accuracy
from lambda_det.training.precision import Precision


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
    """Of several models, which see every image once."""
    batches, read = list(_batches((7, 1, 4), classes)), []
    loader = (read.append(len(batch["labels"])) or batch for batch in batches)
    models = {"raw": Scores().train(), "averaged": Opposite()}
    accuracy = evaluate_accuracy(models, loader, Precision("cpu", None))
    assert read == [7, 1, 4]
    for name, sign in (("raw", 1), ("averaged", -1)):
        first = in_five = loss = 0
        for batch in batches:
            for scores, label in zip(sign * batch["images"], batch["labels"], strict=True):
                rank = (scores > scores[label]).sum()
                first += rank == 0
                in_five += rank < 5
                loss += -F.log_softmax(scores.double(), 0)[label]
        assert accuracy[f"{name}_top1"] == pytest.approx(100 * first.item() / 12)
        assert accuracy[f"{name}_top5"] == pytest.approx(100 * in_five.item() / 12)
        assert accuracy[f"{name}_loss"] == pytest.approx(loss.item() / 12)
