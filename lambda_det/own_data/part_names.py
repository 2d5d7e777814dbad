"""The part of a data set that the names of its files and folders tell: train, val or test."""

from __future__ import annotations

import re
from pathlib import Path

# Words for the parts; evaluations prefer the part that is listed first
PART_WORDS = {
    "train": ("train", "training", "trainset", "trn"),
    "val": ("val", "valid", "validation", "valset", "dev", "eval", "evaluation", "holdout"),
    "test": ("test", "testing", "testset", "tst"),
}
PART_OF_WORD = {word: part for part, words in PART_WORDS.items() for word in words}
# Words that may stand beside them without a separator, as in TrainImages
# fmt: off
_NEUTRAL = {
    "image", "images", "imgs", "pictures", "photos", "jpeg", "label", "labels",
    "annotation", "annotations", "instances", "data", "dataset", "set", "split",
    "coco", "voc", "yolo", "v",
}
# fmt: on
# Training and validation in one, as in trainval and in "Train and Validation"
_TRAIN, _VAL = "train|training", "val|valid|validation"
_TOGETHER = re.compile(rf"\b(?:{_TRAIN})(?: and)? (?:{_VAL})\b|\b(?:{_VAL}) and (?:{_TRAIN})\b")


def named_part(path: Path, root: Path, *, is_file: bool = False) -> str:
    """The part of a path below a folder, by the last of its names that tells one; or "".

    In the name of a folder the word stands alone or beside numbers and words such as images:
    train2017 and val_images are parts, and test_tubes and val_di_fassa are not.

    Args:
        path: of a folder.
        root: the folder of all parts.
        is_file: the path is that of a file, in whose name the word may stand beside any others.
    """
    names = path.relative_to(root).parts if path.is_relative_to(root) else ()
    told = [
        part_in(name)
        for number, name in enumerate(names, 1)
        if is_part_alone(name) or (is_file and number == len(names))
    ]
    return next(filter(None, reversed(told)), "")


def part_in(name: str) -> str:
    """The part that the last word for one in a name tells; or ""."""
    words = reversed(_words_of(name))
    return next((PART_OF_WORD[word] for word in words if word in PART_OF_WORD), "")


def is_part_alone(name: str) -> bool:
    """Whether all words of a name are for parts or beside them."""
    return all(word in PART_OF_WORD or word in _NEUTRAL for word in _words_of(name))


def _words_of(name: str) -> list[str]:
    """The words of the name of a file or folder in small letters."""
    # TrainImages has two words. TestTube has one, because it may be a class. Any spelling of
    # training and validation together is the word trainval, which is no word for a part.
    words = []
    for letters in _LETTERS.findall(name):
        inner = [word.lower() for word in _CAMEL_CASE.findall(letters)]
        are_known = all(word in PART_OF_WORD or word in _NEUTRAL for word in inner)
        words += inner if are_known else [letters.lower()]
    return _TOGETHER.sub("trainval", " ".join(words)).split()


_LETTERS, _CAMEL_CASE = re.compile("[A-Za-z]+"), re.compile("[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
