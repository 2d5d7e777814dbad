import itertools
import logging
import pickle
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch

from lambda_det.classification.data import (
    FolderSource,
    LabelledTrainLoader,
    build_eval_loader,
    transforms,
)
from lambda_det.classification.data import loader as loader_module
from lambda_det.classification.data.loader import EpochBatches
from lambda_det.errors import DataError
from lambda_det.training.loading import ImageLoader
from tests.classification.data.toy import ToySource


def order_of_batches(count, size=10, seed=0, start=0, batch=5, rank=0, world_size=1):
    sampler = EpochBatches(size, seed, start, batch, rank, world_size)
    return list(itertools.islice(sampler, count))


def stream(count, size=10, seed=0, start=0):
    return [pair for (pair,) in order_of_batches(count, size, seed, start, batch=1)]


def test_every_epoch_is_a_permutation_and_another_one():
    pairs = stream(50)
    assert [epoch for epoch, _ in pairs] == [e for e in range(5) for _ in range(10)]
    orders = [[i for _, i in pairs[e * 10 : e * 10 + 10]] for e in range(5)]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 5
    assert list(range(10)) not in orders


def test_the_order_is_that_of_the_seed():
    """In a stream of its own: the plain (seed, epoch) is that of the first sample."""
    assert [i for _, i in stream(30, seed=5)[10:20]] == list(
        np.random.default_rng((5, 1, 0, 1)).permutation(10)
    )
    assert stream(30) == stream(30)
    assert stream(30) != stream(30, seed=1)
    assert all(type(number) is int for pair in stream(3) for number in pair)


@pytest.mark.parametrize(
    ("size", "world_size", "batch", "start"),
    [
        # Each two of the values meet
        (size, world_size, (1, 4, 12)[(i + j) % 3], (0, 12, 25)[(i + 2 * j) % 3])
        for i, size in enumerate((1, 3, 10, 16))
        for j, world_size in enumerate((1, 2, 3, 7))
    ],
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


def as_process(monkeypatch, rank, world_size):
    monkeypatch.setattr("detectron2.utils.comm.get_rank", lambda: rank)
    monkeypatch.setattr("detectron2.utils.comm.get_world_size", lambda: world_size)


def assert_same_batches(batches, others):
    assert len(batches) == len(others)
    for batch, other in zip(batches, others, strict=True):
        torch.testing.assert_close(batch, other, rtol=0, atol=0)


def test_batches_are_the_samples_in_the_order_of_the_sampler(cfg):
    """Against transforms that are called one by one."""
    source = ToySource(LABELS)
    batches = train_batches(cfg, source, 5, seed=3)  # 20 samples of 11 images
    assert_same_batches(train_batches(cfg, source, 2, begin=3, seed=3), batches[3:])
    order = itertools.chain.from_iterable(EpochBatches(11, 3, 0, 4, 0, 1))
    transform = transforms.TrainTransform(cfg)
    for batch in batches:
        assert batch["images"].shape == (4, 16, 16, 3) and batch["images"].dtype == torch.uint8
        assert batch["labels"].shape == (4,) and batch["labels"].dtype == torch.int64
        for image, label in zip(batch["images"], batch["labels"], strict=True):
            epoch, index = next(order)
            rng = np.random.default_rng((3, epoch, index))
            np.testing.assert_array_equal(image, transform(source.load(index), rng))
            assert label == LABELS[index]


def test_workers_change_nothing(cfg, make_folder):
    """Not the order, and not a bit of an image."""
    source = FolderSource(make_folder({"ant": 5, "bee": 4}))
    cfg.INPUT.RANDAUGMENT.LAYERS = 2
    expected = train_batches(cfg, source, 6)
    for cfg.DATALOADER.NUM_WORKERS in (1, 2):
        assert_same_batches(train_batches(cfg, source, 6), expected)


@pytest.fixture
def given(monkeypatch):
    """The loaders that are made."""
    made = []

    def record(dataset, **arguments):
        made.append(ImageLoader(dataset, **arguments))
        return made[-1]

    monkeypatch.setattr(loader_module, "ImageLoader", record)
    return made


@pytest.mark.parametrize("build", [build_eval_loader, train_loader])
def test_everything_can_be_sent_to_a_spawned_worker(cfg, make_folder, given, build):
    """Where processes are not forked, as on macOS, and from Python 3.14 on."""
    loader = build(cfg, FolderSource(make_folder({"ant": 5, "bee": 4})), batch_size=4)
    next(iter(loader))
    keys = [3, 4] if build is build_eval_loader else [(1, 3), (1, 4)]
    dataset = given[0].dataset
    copy = pickle.loads(ForkingPickler.dumps(dataset))
    for key in keys:
        torch.testing.assert_close(copy[key], dataset[key])
    for sent in (given[0].collate_fn, given[0].worker_init_fn):
        pickle.loads(ForkingPickler.dumps(sent))


@pytest.mark.parametrize(("world_size", "workers"), [(1, 0), (2, 0), (13, 0), (1, 2), (3, 1)])
def test_evaluation_has_each_image_once_over_all_processes(cfg, monkeypatch, world_size, workers):
    cfg.DATALOADER.NUM_WORKERS = workers
    source, transform = ToySource(LABELS), transforms.TestTransform(cfg)
    seen = []
    for rank in range(world_size):
        as_process(monkeypatch, rank, world_size)
        loader = build_eval_loader(cfg, source, batch_size=2)
        batches = list(loader)
        assert len(batches) == len(loader)
        assert all(len(batch["labels"]) == 2 for batch in batches[:-1])
        for batch in batches:
            seen += zip(batch["images"], batch["labels"].tolist(), strict=True)
    assert len(seen) == 11
    seen.sort(key=lambda pair: int(pair[0][0, 0, 0]))
    for index, (image, label) in enumerate(seen):
        np.testing.assert_array_equal(image, transform(source.load(index)))
        assert label == LABELS[index]


@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_training_images_are_named_and_replaced_by_the_next(cfg, caplog, workers):
    """The samples in their place are those of the next image: same epoch, its own index."""
    cfg.DATALOADER.NUM_WORKERS = workers
    cfg.DATA.MAX_UNREADABLE_IMAGES = 2
    source = ToySource(LABELS, broken={4, 10})
    with caplog.at_level(logging.WARNING, logger="lambda_det"):
        batches = train_batches(cfg, source, 11, batch_size=2)
    order = itertools.chain.from_iterable(EpochBatches(11, 0, 0, 2, 0, 1))
    transform = transforms.TrainTransform(cfg)
    for batch in batches:
        for image, label in zip(batch["images"], batch["labels"], strict=True):
            epoch, index = next(order)
            index = {4: 5, 10: 0}.get(index, index)
            rng = np.random.default_rng((0, epoch, index))
            np.testing.assert_array_equal(image, transform(source.load(index), rng))
            assert label == LABELS[index]
    if workers == 0:  # the log of a worker process is not captured
        messages = [record.getMessage() for record in caplog.records]
        for name in ("image 4 is", "image 10 is"):  # once, however often it is drawn
            assert sum(name in message for message in messages) == 1


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_unreadable_images_end_a_training_past_the_limit_and_every_evaluation(cfg, workers):
    cfg.DATALOADER.NUM_WORKERS = workers
    cfg.DATA.MAX_UNREADABLE_IMAGES = 1
    # Two workers may each meet one at the same time.
    with pytest.raises(DataError, match=r"[23] unreadable .*DATA\.MAX_UNREADABLE_IMAGES is 1") as e:
        train_batches(cfg, ToySource(LABELS, broken={1, 4, 7}), 20)
    assert "is broken" in str(e.value) and "\n" not in str(e.value)
    with pytest.raises(DataError, match=r"^image 7 is broken$"):
        list(build_eval_loader(cfg, ToySource(LABELS, broken={7}), batch_size=2))


def test_no_global_random_numbers_are_drawn(cfg):
    cfg.INPUT.RANDAUGMENT.LAYERS = 2
    before = torch.get_rng_state(), str(np.random.get_state())
    train_batches(cfg, ToySource(LABELS), 2)
    list(build_eval_loader(cfg, ToySource(LABELS), batch_size=2))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert str(np.random.get_state()) == before[1]
