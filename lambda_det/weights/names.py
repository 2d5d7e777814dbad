"""Map the tensor names of a file to the names in a model, and report what is missing."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lambda_det.errors import WeightsError, listed
from lambda_det.foundation import Backbone

_WRAPPERS = ("module", "_orig_mod")  # DistributedDataParallel and AveragedModel; torch.compile
_OWNERS = ("backbone", "bottom_up")  # classifiers and detectors; FPN
# Counters do not change what a network computes, and the configuration sets the pixel settings,
# which checkpoints of some versions of Detectron2 hold
_NO_WEIGHTS = ("num_batches_tracked", "n_averaged", "pixel_mean", "pixel_std")


def is_weight(name: str) -> bool:
    """Whether a tensor must be in model and file; others may be missing or left over."""
    return name.rpartition(".")[2] not in _NO_WEIGHTS


def _stripped(name: str, prefixes: Iterable[str]) -> str:
    # torch.compile inserts _orig_mod before each compiled submodule, at any depth
    words = [word for word in name.split(".") if word != "_orig_mod"]
    while len(words) > 1 and words[0] in prefixes:
        del words[0]
    return ".".join(words)


def bare_name(name: str) -> str:
    """The name of a tensor in the backbone itself, without the prefixes of enclosing modules.

    Removed are ``backbone.`` and ``bottom_up.`` (classifiers, detectors), ``module.``
    (DistributedDataParallel, AveragedModel) and ``_orig_mod.`` (torch.compile), nested in any way.
    """
    return _stripped(name, _WRAPPERS + _OWNERS)


def backbone_prefixes(model: nn.Module) -> list[str]:
    """Name prefixes of the networks that see the images. Of an FPN this is its ``bottom_up``.

    Returns:
        Usually one prefix. [""] for a model without a submodule of Detectron2's ``Backbone``.
    """
    names = [name for name, one in model.named_modules() if isinstance(one, Backbone)]
    prefixes = [f"{name}." if name else "" for name in names]
    innermost = [p for p in prefixes if not any(q != p and q.startswith(p) for q in prefixes)]
    return innermost or [""]


def tensors_only(state: Any, path: str | Path) -> dict[str, Tensor]:
    """Convert the arrays of a state dict to tensors.

    Args:
        state: name to tensor or array.
        path: named in messages.

    Raises:
        WeightsError: ``state`` is no dict, or a value is neither a tensor nor an array of numbers.
    """
    if not isinstance(state, dict):
        raise WeightsError(
            f'{path} has a {type(state).__name__} under "model" instead of a state dict.'
        )
    result = OrderedDict()
    for name, value in state.items():
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            value = torch.from_numpy(value)
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise WeightsError(
                f"{path} is not a file of weights: its entry {name!r} is a {type(value).__name__}, "
                'not a tensor; name a state dict, or a file with a state dict under "model".'
            )
        result[name] = value
    return with_metadata(result, state)


def with_metadata(state: OrderedDict, source: Mapping[str, Any]) -> OrderedDict:
    """Copy the module versions. Some modules of Detectron2 convert old state dicts by them."""
    metadata = getattr(source, "_metadata", None)
    if metadata is not None:
        state._metadata = OrderedDict(
            (_stripped(name, _WRAPPERS), versions) for name, versions in metadata.items()
        )
    return state


def _first_words(names: Iterable[str], prefix: str) -> set[str]:
    """The first words, such as stem and res2, of the names that begin with ``prefix``."""
    return {name[len(prefix) :].split(".")[0] for name in names if name.startswith(prefix)}


def named_as_in(
    own: Mapping[str, Tensor],
    prefix: str | None,
    state: Mapping[str, Tensor],
    path: str | Path,
) -> dict[str, Tensor]:
    """Rename the tensors of a file to the names they have in a model.

    Args:
        own: the state dict of the model.
        prefix: of the backbone in the model. None: keep the backbone's names.
        state: the state dict of the file.
        path: of the file, named in messages.

    Returns:
        ``state`` with new names. Backbone tensors get ``prefix`` and their :func:`bare_name`; all
        others only lose the prefixes of wrappers.

    Raises:
        WeightsError: two tensors would get the same name.
    """
    modules = set() if prefix is None else _first_words(own, prefix)
    result: dict[str, Tensor] = {}
    before: dict[str, str] = {}
    for name, tensor in state.items():
        bare = bare_name(name)
        new = prefix + bare if bare.split(".")[0] in modules else _stripped(name, _WRAPPERS)
        if new in result:
            raise WeightsError(
                f"{path} is ambiguous: both {before[new]} and {name} map to {new}; keep one of "
                "them."
            )
        result[new] = tensor
        before[new] = name
    return result


@dataclass(frozen=True)
class Fit:
    """How the tensors of a file match a model's. True if all of them match.

    Attributes:
        wanted: number of tensors of the model.
        missing: names that the file lacks.
        reshaped: a phrase for each tensor of another shape.
        unexpected: names in the file that belong to the same submodules but not to the model.
    """

    wanted: int
    missing: list[str]
    reshaped: list[str]
    unexpected: list[str]

    def __bool__(self) -> bool:
        return not (self.missing or self.reshaped or self.unexpected)

    def __str__(self) -> str:
        phrases = [
            *self.reshaped,
            *(f"{name} is missing" for name in self.missing),
            *(f"{name} is only in the file" for name in self.unexpected),
        ]
        return (
            f"{len(self.missing) + len(self.reshaped)} of its {self.wanted} tensors don't match, "
            f"{len(self.unexpected)} are too many: {listed(phrases)}"
        )


def compare(own: Mapping[str, Tensor], state: Mapping[str, Tensor], prefix: str = "") -> Fit:
    """Compare names and shapes of the tensors whose names begin with ``prefix``.

    Args:
        own: the state dict of the model. What is no weight, see :func:`is_weight`, does not count.
        state: the tensors of the file, as returned by :func:`named_as_in`.
        prefix: of the tensors to compare.
    """
    here, there = (
        {n: list(t.shape) for n, t in tensors.items() if n.startswith(prefix) and is_weight(n)}
        for tensors in (own, state)
    )
    modules = _first_words(here, prefix)
    return Fit(
        wanted=len(here),
        missing=[name for name in here if name not in there],
        reshaped=[
            f"{name} has shape {there[name]} in the file but {shape} in the model"
            for name, shape in here.items()
            if there.get(name, shape) != shape
        ],
        unexpected=[n for n in there if n not in here and _first_words([n], prefix) <= modules],
    )


def check_shared(model: nn.Module, state: Mapping[str, Tensor], path: str | Path) -> None:
    """Refuse different tensors under the names of one shared parameter.

    The last tensor loaded would overwrite the others.

    Args:
        model: whose parameters may be shared, each then with several names.
        state: by the names of the model.
        path: of the file, for the message.

    Raises:
        WeightsError: names two tensors that differ.
    """
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name not in state or state[name].shape != parameter.shape:
            continue
        other = first.setdefault(id(parameter), name)
        if other != name and not torch.allclose(
            state[name].double(), state[other].double(), rtol=0, atol=0, equal_nan=True
        ):
            raise WeightsError(
                f"{path} holds different tensors {other} and {name}, which are one and the same in "
                "the model: share in it only what the file shares (share_positions of lambda "
                "layers)."
            )
