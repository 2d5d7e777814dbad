"""The generated data sets, small, under the names that Detectron2 knows them by."""

import pytest

from lambda_det.detection.data import register_shapes
from tests.shapes import make_panoptic_shapes, make_shapes


@pytest.fixture(scope="session")
def _shapes(tmp_path_factory):
    root = tmp_path_factory.mktemp("shapes")
    make_shapes(root, num_train=8, num_val=3, size=64)
    make_panoptic_shapes(root, num_train=8, num_val=3, size=64)
    return root


@pytest.fixture
def shapes(_shapes):
    """The folder of shapes and shapes_panoptic, which are registered during the test."""
    register_shapes(_shapes)
    yield _shapes
    register_shapes("datasets")
