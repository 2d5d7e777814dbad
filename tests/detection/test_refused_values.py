"""A value that a library refuses is one sentence with the key, the value and what is allowed."""

import argparse
from pathlib import Path

import pytest
from detectron2.config import CfgNode

from lambda_det.detection import load_config
from lambda_det.errors import ConfigError
from tests.detection.heads.tiny import HEADS
from tests.detection.tiny import on_meta

CONFIGS = Path(__file__).parents[2] / "configs"


def _load(head: str, *pairs: object) -> CfgNode:
    file = str(CONFIGS / f"{HEADS[head].config}.yaml")
    opts = [*HEADS[head].opts(), "MODEL.DEVICE", "cpu", *map(str, pairs)]
    return load_config(argparse.Namespace(config_file=file, opts=opts))


# Refused while the model is made: (head, key, value, a word of what is allowed)
OF_MODELS = [
    ("cascade_mask_rcnn", "MODEL.META_ARCHITECTURE", "GeneralisedRCNN", "GeneralizedRCNN"),
    ("cascade_mask_rcnn", "MODEL.ROI_HEADS.NAME", "CascadeHeads", "CascadeROIHeads"),
]


@pytest.mark.parametrize(("head", "key", "value", "allowed"), OF_MODELS)
def test_a_model_that_cannot_be_made_names_the_key(head, key, value, allowed):
    with pytest.raises(ConfigError) as caught:
        on_meta(_load(head, key, value))
    text = str(caught.value)
    assert text.startswith(f"{key} ") and str(value) in text and allowed in text, text
