"""The generated data sets, made by a script of ``datasets/``."""

from tests.tool import load_tool

_SCRIPT = load_tool("make_shapes", "datasets")
make_shapes = _SCRIPT.make_shapes
make_panoptic_shapes = _SCRIPT.make_panoptic_shapes
