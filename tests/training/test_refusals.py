"""What cannot be is refused before a run begins, by the user's key and value."""

import dataclasses

import pytest

from lambda_det.errors import ConfigError
from lambda_det.training.hooks import writers_of
from lambda_det.training.precision import Precision
from lambda_det.training.settings import Clipping, Settings
from tests.training.toy import settings

NAMES = [field.name for field in dataclasses.fields(Settings)]
NAMES += [f"clipping.{field.name}" for field in dataclasses.fields(Clipping)]
KEYS = {name: f"KEY.{name.upper()}" for name in NAMES}


def _settings(**changes):
    return settings(keys=KEYS, **changes)


def _clipping(**changes):
    return _settings(clipping=Clipping(**{"kind": "norm", "limit": 1.0, **changes}))


def _precision(dtype):
    return Precision.of(_settings(amp_dtype=dtype))


def _writer(name):
    writers_of(_settings(event_writers=("tensorboard", name)))


@pytest.mark.parametrize(
    ("make", "bad", "words"),
    [
        (_settings, {"accumulate": 0}, r"KEY\.ACCUMULATE is 0"),
        (_settings, {"images_per_step": 0}, r"KEY\.IMAGES_PER_STEP is 0"),
        (_settings, {"checkpoint_period": -1}, r"KEY\.CHECKPOINT_PERIOD is -1"),
        (_settings, {"log_period": 0}, r"KEY\.LOG_PERIOD is 0"),
        (_settings, {"checkpoints_kept": 0}, r"KEY\.CHECKPOINTS_KEPT is 0"),
        (_settings, {"num_workers": -1}, r"KEY\.NUM_WORKERS is -1"),
        (_settings, {"timeout": -1}, r"KEY\.TIMEOUT is -1"),
        (_settings, {"patience": -1}, r"KEY\.PATIENCE is -1"),
        # below 0 the weights would be extrapolated, and percent would average all steps alike
        (_settings, {"ema_decay": -0.5}, r"KEY\.EMA_DECAY is -0\.5"),
        (_settings, {"ema_decay": 99.9}, r"KEY\.EMA_DECAY is 99\.9"),
        (_settings, {"float32_precision": "low"}, r"KEY\.FLOAT32_PRECISION is 'low'.*medium"),
        (_settings, {"amp_dtype": "half"}, r"KEY\.AMP_DTYPE is 'half'.*auto"),
        (_clipping, {"kind": "nrom"}, r"KEY\.CLIPPING\.KIND is 'nrom'.*full_model"),
        (_clipping, {"limit": 0.0}, r"KEY\.CLIPPING\.LIMIT is 0"),
        (_clipping, {"limit": float("nan")}, r"KEY\.CLIPPING\.LIMIT is nan"),
        (_clipping, {"limit": float("inf")}, r"KEY\.CLIPPING\.LIMIT is inf"),
        (_clipping, {"norm_type": 0.0}, r"KEY\.CLIPPING\.NORM_TYPE is 0"),
        (_precision, {"dtype": "float16"}, r"KEY\.AMP_DTYPE float16 .*KEY\.AMP_DTYPE auto"),
        (_writer, {"name": "tensorbord"}, r"KEY\.EVENT_WRITERS.*tensorbord"),
        (_writer, {"name": "no.such.Writer"}, r"KEY\.EVENT_WRITERS.*no\.such\.Writer"),
        (_writer, {"name": "detectron2.utils.events.X"}, r"KEY\.EVENT_WRITERS.*events.X"),
        (_writer, {"name": f"{__name__}.KEYS"}, r"KEY\.EVENT_WRITERS.*KEYS"),
        (_writer, {"name": ".a.B"}, r"KEY\.EVENT_WRITERS.*\.a\.B"),
    ],
)
def test_refusals(make, bad, words):
    with pytest.raises(ConfigError, match=words):
        make(**bad)
