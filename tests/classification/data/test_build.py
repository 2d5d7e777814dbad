import pytest
import torch

from lambda_det.classification.data.build import build_sources
from lambda_det.errors import UserError


@pytest.fixture
def ready(cfg, make_folder):
    cfg.DATA.TRAIN = str(make_folder({"ant": 10, "bee": 30}, "train"))
    cfg.DATA.VAL = str(make_folder({"ant": 2, "bee": 3}, "val"))
    return cfg


def names(source):
    return [source.name(index) for index in range(len(source))]


def per_class(source):
    return torch.bincount(torch.from_numpy(source.labels)).tolist()


def test_held_out_images_are_of_the_fraction_that_is_used(ready):
    sources = build_sources(ready)
    assert per_class(sources.train) == [10, 30] and sources.held_out is None
    assert per_class(sources.val) == [2, 3]
    assert sources.train.classes == sources.val.classes == ["ant", "bee"]
    ready.DATA.FRACTION = 0.5
    half = names(build_sources(ready).train)
    ready.DATA.HELD_OUT, held_out = 0.2, {}
    for ready.SEED in (1, 0):
        sources = build_sources(ready)
        held_out[ready.SEED] = names(sources.held_out)
    assert held_out[0] != held_out[1]
    assert per_class(sources.train) == [4, 12] and per_class(sources.held_out) == [1, 3]
    assert sorted(names(sources.train) + held_out[0]) == half
    ready.DATA.VAL = ""  # then the held-out images serve
    assert build_sources(ready).val is None


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        (("DATA.VAL", ""), r"DATA\.VAL .*DATA\.HELD_OUT"),
        (("DATA.TRAIN", "few", "DATA.HELD_OUT", 0.5), r"DATA\.HELD_OUT"),  # nothing to hold out
    ],
)
def test_values_that_cannot_work(ready, make_folder, monkeypatch, pairs, text):
    monkeypatch.chdir(make_folder({"ant": 1, "bee": 1}, "few").parent)
    ready.merge_from_list(list(pairs))
    with pytest.raises(UserError, match=text):
        build_sources(ready)
