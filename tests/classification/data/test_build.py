import pytest
import torch

from lambda_det.classification.data import build_sources
from lambda_det.errors import ConfigError, DataError


@pytest.fixture
def ready(cfg, make_folder):
    cfg.DATA.TRAIN = str(make_folder({"ant": 10, "bee": 30}, "train"))
    cfg.DATA.VAL = str(make_folder({"ant": 2, "bee": 3}, "val"))
    return cfg


def names(source):
    return [source.name(index) for index in range(len(source))]


def per_class(source):
    return torch.bincount(torch.from_numpy(source.labels)).tolist()


def test_folders(ready):
    sources = build_sources(ready)
    assert per_class(sources.train) == [10, 30] and sources.held_out is None
    assert per_class(sources.val) == [2, 3]
    assert sources.train.classes == sources.val.classes == ["ant", "bee"]


def test_held_out_images_are_of_the_fraction_that_is_used(ready):
    whole = names(build_sources(ready).train)
    ready.DATA.FRACTION = 0.5
    half = names(build_sources(ready).train)
    ready.DATA.HELD_OUT = 0.2
    sources = build_sources(ready)
    assert per_class(sources.train) == [4, 12] and per_class(sources.held_out) == [1, 3]
    assert sorted(names(sources.train) + names(sources.held_out)) == half
    assert set(half) < set(whole) and len(half) == 20
    assert per_class(sources.val) == [2, 3]


def test_the_split_is_that_of_the_seed(ready):
    ready.DATA.HELD_OUT = 0.2
    held_out = {}
    for ready.SEED in (-1, 0, 1):
        held_out[ready.SEED] = names(build_sources(ready).held_out)
    assert held_out[-1] == held_out[0] != held_out[1]


def test_without_validation_images_the_held_out_ones_serve(ready):
    ready.DATA.VAL = ""
    with pytest.raises(ConfigError, match=r"DATA\.VAL .*DATA\.HELD_OUT"):
        build_sources(ready)
    ready.DATA.HELD_OUT = 0.1
    sources = build_sources(ready)
    assert sources.val is None and per_class(sources.held_out) == [1, 3]


def test_nothing_to_hold_out(ready, make_folder):
    ready.DATA.TRAIN = str(make_folder({"ant": 1, "bee": 1}, "few"))
    ready.DATA.HELD_OUT = 0.5
    with pytest.raises(DataError, match=r"DATA\.HELD_OUT"):
        build_sources(ready)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("FORMAT", "folders", r"DATA\.FORMAT 'folders'.* folder\?"),
        ("FORMAT", "cifar-10", r"cifar10\?"),
        ("FORMAT", "lmdb", r"folder, cifar10"),
    ],
)
def test_values_that_cannot_work(ready, key, value, text):
    ready.DATA[key] = value
    with pytest.raises(ConfigError, match=text):
        build_sources(ready)
