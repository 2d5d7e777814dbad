import pytest
import torch
from torch.nn import functional as F

import lambda_det
from lambda_det.classification.config import get_classification_config
from lambda_det.classification.model import build_classifier, model_options
from lambda_det.errors import ConfigError

LAYER = "MODEL.LAMBDA_RESNET"


def _cfg(*pairs):
    cfg = get_classification_config()
    cfg.merge_from_list(
        ["MODEL.DEVICE", "cpu", "MODEL.NAME", "lambda_resnet26", "INPUT.SIZE", 32, *pairs]
    )
    return cfg


def _batch():
    images = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    return {"images": images, "labels": torch.tensor([1, 4])}


@pytest.mark.parametrize("channels_last", [True, False])
def test_scores_are_those_of_the_network_on_normalised_images(channels_last):
    model = build_classifier(_cfg("MODEL.CHANNELS_LAST", channels_last), 5).eval()
    batch = _batch()
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    images = (batch["images"].float() / 255 - mean) / std  # as torchvision's users know it
    with torch.no_grad():
        expected = model.classifier(images.permute(0, 3, 1, 2))
        torch.testing.assert_close(model(batch), expected, atol=1e-4, rtol=1e-4)
        with torch.autocast("cpu", torch.bfloat16):
            assert model(batch).dtype == torch.float32
    weight = model.classifier.backbone.stem.conv1.weight
    assert weight.is_contiguous(memory_format=model.layout)


def test_training_gives_the_smoothed_loss():
    model = build_classifier(_cfg("SOLVER.LABEL_SMOOTHING", 0.1), 5)
    batch = _batch()
    loss = model(batch)["loss"]
    for module in model.eval().modules():
        # the statistics of the batch, as in training
        module.training = isinstance(module, torch.nn.BatchNorm2d)
    logs = F.log_softmax(model(batch).double(), 1)
    target = 0.9 * F.one_hot(batch["labels"], 5) + 0.1 / 5
    torch.testing.assert_close(loss.double(), -(target * logs).sum(1).mean(), rtol=1e-4, atol=1e-4)


def test_the_checkpoint_is_that_of_create_classifier():
    cfg = _cfg("MODEL.DROPOUT", 0.25, "MODEL.STOCHASTIC_DEPTH", 0.1)
    model = build_classifier(cfg, 5)
    again = lambda_det.create_classifier(cfg.MODEL.NAME, 5, **model_options(cfg))
    again.load_state_dict(model.classifier.state_dict())
    assert again.backbone.dropout.p == 0.25
    assert not any("pixel" in name for name in model.state_dict())


@pytest.mark.parametrize(
    ("pairs", "word"),
    [
        ((f"{LAYER}.GLOBAL_CONTEXT", 32, "INPUT.SIZE", 64), "INPUT.SIZE is 64"),
        ((f"{LAYER}.GLOBAL_CONTEXT", 32, "INPUT.TEST_SIZE", 64), "INPUT.TEST_SIZE is 64"),
        (("MODEL.NAME", "resnet50", f"{LAYER}.SHARE_POSITIONS", "size"), "SHARE_POSITIONS"),
        ((f"{LAYER}.GLOBAL_CONTEXT", 256, f"{LAYER}.SCOPE", 7), "scope and global_context"),
        ((f"{LAYER}.SHARE_POSITIONS", "all"), "share_positions is 'all'"),
        ((f"{LAYER}.STAGE_SCOPES", [3, 5]), r"stage_scopes is \[3, 5\]"),
        (("MODEL.NAME", "mobilenet_v2", "MODEL.STOCHASTIC_DEPTH", 0.1), "STOCHASTIC_DEPTH"),
    ],
)
def test_models_that_cannot_be(pairs, word):
    with pytest.raises(ConfigError, match=word):
        build_classifier(_cfg(*pairs), 10)


def test_options_of_the_model_arrive():
    """A global context may be tested at the size of training."""
    pairs = (f"{LAYER}.GLOBAL_CONTEXT", 32, "INPUT.TEST_SIZE", 32)
    options = model_options(_cfg(*pairs, "MODEL.CHECKPOINT_ACTIVATIONS", True))
    assert options["global_context"] == 32 and options["checkpoint_activations"] is True
