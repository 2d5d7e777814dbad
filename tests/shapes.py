"""The generated data sets, made by a script of ``datasets/``."""

from pathlib import Path

from tests.tool import load_tool

_SCRIPT = load_tool("make_shapes", "datasets")
make_shapes = _SCRIPT.make_shapes
make_panoptic_shapes = _SCRIPT.make_panoptic_shapes


def shapes_by_flag(root: Path, **numbers: int) -> dict[str, str]:
    """Make shapes below ``root``; their files and folders, by the flags that name them."""
    make_shapes(root, **numbers)
    flags = {}
    for part, split in (("train", "train"), ("test", "val")):
        flags[f"{part}_json"] = str(root / f"shapes/annotations/instances_{split}.json")
        flags[f"{part}_images"] = str(root / "shapes" / split)
    return flags


def data_words(root: Path, **numbers: int) -> list[str]:
    """The same as words of a command line."""
    flags = shapes_by_flag(root, **numbers)
    return [word for k, v in flags.items() for word in (f"--{k.replace('_', '-')}", v)]
