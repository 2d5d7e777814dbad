"""The small data sets of the tests of detection's data."""

from tests.detection.conftest import _shapes, shapes
from tests.detection.data.conftest import cfg, content, write

__all__ = ["_shapes", "cfg", "content", "shapes", "write"]
