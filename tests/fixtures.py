"""What every test has, and what is set before the first; imported in processes that run tests."""

import atexit
import functools
import gc
import logging
import multiprocessing
import os
import pickle
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import yaml
from detectron2.data import DatasetCatalog, MetadataCatalog
from hypothesis import HealthCheck, Phase, settings

# Before any test: the data sets that it registers stay.
import lambda_det  # noqa: F401
from lambda_det.detection import first_batch, matches

# The same cases in each run, of which a larger LAMBDA_DET_FUZZ has more
settings.register_profile(
    "tests",
    max_examples=int(os.environ.get("LAMBDA_DET_FUZZ") or 5),
    derandomize=True,
    phases=[Phase.generate],  # report a failure at once, as it was found
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
settings.load_profile("tests")


# From Python 3.14 on the processes of loaders come from a forkserver, to which the tests' mappers
# cannot be sent. That the package's own can be is tested for the data sets (test_loader.py)
if sys.platform == "linux":
    multiprocessing.set_start_method("fork", force=True)

# What is imported stays, and to look through it for garbage takes a fifth of some tests
gc.disable()


_HAS_PACKAGE = (Path(__file__).parents[1] / "lambda_det").is_dir()
# By mark, whether its tests are skipped here, and why
_SKIPPED = {
    "posix": (sys.platform == "win32", "Windows lacks what it needs"),
    "checkout": (not _HAS_PACKAGE, "the package is not beside the tests"),
}


def pytest_collection_modifyitems(items):
    for mark, (is_skipped, reason) in _SKIPPED.items():
        for item in items if is_skipped else ():
            if item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))


def pytest_collection_finish():
    gc.freeze()
    gc.set_threshold(20_000)  # new objects, of which a test makes thousands; Python's is less
    gc.enable()


def pytest_unconfigure():
    # Else some libraries report leaks; at the end, since pytest looks for garbage before it
    atexit.register(gc.unfreeze)
    # Python would wait for what a test that failed has left
    for process in multiprocessing.active_children():
        process.kill()


@pytest.fixture(autouse=True)
def fixed_seeds():
    """Every test sees the same random numbers, alone or among the others."""
    random.seed(0)
    np.random.seed(0)
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:  # for which torch.manual_seed keeps a stack trace at every call
        torch.default_generator.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def configurations_parsed_once():
    """To parse YAML takes a fifth of the tests of detection, and most of it is the same text."""
    parse = yaml.safe_load
    parsed = functools.cache(lambda text: pickle.dumps(parse(text)))

    def safe_load(stream):
        is_text = isinstance(stream, (str, bytes))
        begin = 0 if is_text else stream.tell()
        text = stream if is_text else stream.read()
        try:
            return pickle.loads(parsed(text))
        except yaml.YAMLError:
            if is_text:
                raise
            stream.seek(begin)
            return parse(stream)  # whose error names the file

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(yaml, "safe_load", safe_load)
        yield


@pytest.fixture(scope="session", autouse=True)
def first_batch_drawn_small():
    """To draw what a run writes to first_batch.jpg takes as long as its steps.

    Returns:
        The values that users have, by their names.
    """
    small = {"_PICTURES": 1, "_SIDE": 64}
    of_users = {name: getattr(first_batch, name) for name in small}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in small.items():
            patch.setattr(first_batch, name, value)
        yield of_users


@pytest.fixture(scope="session", autouse=True)
def intervals_of_few_test_sets():
    """To draw test sets for the interval of an AP takes a fifth of a small training.

    Returns:
        How many users have.
    """
    of_users = matches._REPLICATES
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matches, "_REPLICATES", 4)
        yield of_users


@pytest.fixture(autouse=True)
def catalogs_as_they_were():
    """The data sets that a test registers are forgotten after it."""
    before = set(DatasetCatalog)
    yield
    for name in set(DatasetCatalog) - before:
        DatasetCatalog.remove(name)
        if name in MetadataCatalog:
            MetadataCatalog.remove(name)


@pytest.fixture(autouse=True)
def loggers_as_they_were():
    """A run changes the loggers of its process, which runs other tests afterwards."""
    yield
    for name in ("fvcore", "detectron2", "lambda_det"):
        logger = logging.getLogger(name)
        logger.handlers.clear()
        if logger.level:  # to set it, all loggers forget what they know
            logger.setLevel(logging.NOTSET)
        logger.propagate = True
