import itertools
import pickle
from functools import partial
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from lambda_det.classification.data import transforms
from lambda_det.classification.data.loader import (
    LabelledTrainImages,
    LabelledTrainLoader,
    build_eval_loader,
    epoch_batches,
)
from lambda_det.classification.data.sources import FolderSource
from lambda_det.errors import DataError
from tests.classification.data.toy import ToySource
from tests.training.test_stream import as_process


def order_of_batches(count, size=10, seed=0, start=0, batch=5, rank=0, world_size=1):
    sampler = epoch_batches(size, seed, start, batch, rank, world_size)
    return list(itertools.islice(sampler, count))


def stream(count, size=10, seed=0, start=0):
    return [pair for (pair,) in order_of_batches(count, size, seed, start, batch=1)]


def test_the_order_is_that_of_the_seed():
    """In a stream of its own: the plain (seed, epoch) is that of the first sample."""
    orders = [np.random.default_rng((5, epoch, 0, 1)).permutation(10) for epoch in range(3)]
    expected = [(epoch, index) for epoch, order in enumerate(orders) for index in order]
    assert stream(30, seed=5) == expected
    assert stream(30) != stream(30, seed=1)
    assert all(type(number) is int for pair in stream(3) for number in pair)


@pytest.mark.parametrize(
    ("size", "world_size", "batch", "start"),
    [(1, 1, 12, 25), (3, 2, 4, 12), (10, 7, 1, 0), (10, 3, 12, 12), (16, 2, 4, 25), (1, 7, 4, 12)],
)
def test_the_processes_take_turns_with_the_single_stream(size, world_size, batch, start):
    """Also where an epoch has fewer images than there are processes, or than a batch has."""
    single = stream(3 * batch * world_size, size, start=start)
    shares = [
        order_of_batches(3, size, 0, start, batch, rank, world_size) for rank in range(world_size)
    ]
    turns = [pair for step in range(3) for share in shares for pair in share[step]]
    assert turns == single


LABELS = [index % 3 for index in range(11)]


def train_loader(cfg, source, *, batch_size=4, begin=0, seed=0):
    loader = LabelledTrainLoader(cfg, source, batch_size=batch_size)
    loader.begin(seed, begin)
    return loader


def train_batches(cfg, source, count, **options):
    return list(itertools.islice(train_loader(cfg, source, **options), count))


assert_same = partial(torch.testing.assert_close, rtol=0, atol=0)


def assert_samples(cfg, source, batches, seed, readable=None):
    """The samples are those of transforms called one by one, in the order of the sampler.

    Args:
        readable: indices by those that cannot be read, whose place they take.
    """
    order = itertools.chain.from_iterable(epoch_batches(11, seed, 0, 1, 0, 1))
    transform = transforms.TrainTransform(cfg)
    for batch in batches:
        for image, label in zip(batch["images"], batch["labels"], strict=True):
            epoch, index = next(order)
            index = (readable or {}).get(index, index)
            rng = np.random.default_rng((seed, epoch, index))
            np.testing.assert_array_equal(image, transform(source.load(index), rng))
            assert label == LABELS[index]


def test_batches_are_the_samples_in_the_order_of_the_sampler(cfg):
    source = ToySource(LABELS)
    batches = train_batches(cfg, source, 5, seed=3)  # 20 samples of 11 images
    assert_same(train_batches(cfg, source, 2, begin=3, seed=3), batches[3:])
    assert_samples(cfg, source, batches, 3)
    for batch in batches:
        assert batch["images"].shape == (4, 16, 16, 3) and batch["images"].dtype == torch.uint8
        assert batch["labels"].shape == (4,) and batch["labels"].dtype == torch.int64


def test_workers_change_nothing(cfg, make_folder):
    """Not the order, and not a bit of an image."""
    source = FolderSource(make_folder({"ant": 5, "bee": 4}))
    cfg.INPUT.RANDAUGMENT.LAYERS = 2
    expected = train_batches(cfg, source, 6)
    for cfg.DATALOADER.NUM_WORKERS in (1, 2):
        assert_same(train_batches(cfg, source, 6), expected)


def test_everything_can_be_sent_to_a_spawned_worker(cfg, make_folder):
    """Where processes are not forked, as on macOS, and from Python 3.14 on."""
    source = FolderSource(make_folder({"ant": 5, "bee": 4}))
    loader = build_eval_loader(cfg, source, batch_size=4)
    for images, key in ((loader.dataset, 3), (LabelledTrainImages(cfg, source, 0), (1, 3))):
        copy = pickle.loads(ForkingPickler.dumps(images))
        torch.testing.assert_close(copy[key], images[key])
    for sent in (loader.collate_fn, loader.worker_init_fn):
        pickle.loads(ForkingPickler.dumps(sent))


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 0), (13, 0), (3, 1)])
def test_evaluation_has_each_image_once_over_all_processes(cfg, monkeypatch, world_size, workers):
    cfg.DATALOADER.NUM_WORKERS = workers
    source, transform = ToySource(LABELS), transforms.TestTransform(cfg)
    seen = {}
    for rank in range(world_size):
        as_process(monkeypatch, rank, world_size)
        loader = build_eval_loader(cfg, source, batch_size=2)
        batches = list(loader)
        assert len(batches) == len(loader)
        assert all(len(batch["labels"]) == 2 for batch in batches[:-1])
        for batch in batches:
            for image, label in zip(batch["images"], batch["labels"], strict=True):
                index = int(image[0, 0, 0])
                np.testing.assert_array_equal(image, transform(source.load(index)))
                assert label == LABELS[index] and index not in seen
                seen[index] = True
    assert len(seen) == 11


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_training_images_are_named_and_replaced_by_the_next(cfg, caplog, workers):
    """The samples in their place are those of the next image: same epoch, its own index."""
    cfg.DATALOADER.NUM_WORKERS = workers
    cfg.DATA.MAX_UNREADABLE_IMAGES = 2
    source = ToySource(LABELS, broken={4, 10})
    batches = train_batches(cfg, source, 11, batch_size=2)
    assert_samples(cfg, source, batches, 0, readable={4: 5, 10: 0})
    for name in ("image 4 is", "image 10 is") if workers == 0 else ():  # others have their own log
        # once, however often it is drawn
        assert sum(name in record.getMessage() for record in caplog.records) == 1


def test_unreadable_images_end_a_training_past_the_limit_and_every_evaluation(cfg):
    cfg.DATA.MAX_UNREADABLE_IMAGES = 1
    source = ToySource(LABELS, broken={1, 4, 7})
    with pytest.raises(DataError, match=r"2 unreadable .*DATA\.MAX_UNREADABLE_IMAGES is 1") as e:
        train_batches(cfg, source, 20)
    assert "is broken" in str(e.value) and "\n" not in str(e.value)
    with pytest.raises(DataError, match=r"^image 1 is broken$"):
        list(build_eval_loader(cfg, source, batch_size=2))
