"""Which tensor of a file belongs where in a model, and whether all of a backbone is there."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from detectron2.modeling import Backbone
from torch import Tensor, nn

from lambda_det.errors import WeightsError, listed

__all__ = [
    "Fit",
    "backbone_prefixes",
    "bare_name",
    "compare",
    "fitting",
    "is_counter",
    "named_as_in",
    "tensors_only",
]

_WRAPPERS = ("module", "_orig_mod")  # DistributedDataParallel and AveragedModel; torch.compile
_OWNERS = ("backbone", "bottom_up")  # classifiers and detectors; FPN
# Not part of what a network computes
_COUNTERS = ("num_batches_tracked", "n_averaged")


def is_counter(name: str) -> bool:
    """Whether a tensor of that name only counts steps, so that it may be missing or left over."""
    return name.rpartition(".")[2] in _COUNTERS


def _stripped(name: str, prefixes: Iterable[str]) -> str:
    # torch.compile's mark may stand before any part that was compiled
    parts = [part for part in name.split(".") if part != "_orig_mod"]
    while len(parts) > 1 and parts[0] in prefixes:
        del parts[0]
    return ".".join(parts)


def bare_name(name: str) -> str:
    """A backbone's own name for its tensor, without the prefixes of what held it.

    Those are ``backbone.`` and ``backbone.bottom_up.`` of classifiers and detectors, ``module.`` of
    DistributedDataParallel and AveragedModel, ``_orig_mod.`` of torch.compile, one in another.
    """
    return _stripped(name, _WRAPPERS + _OWNERS)


def backbone_prefixes(model: nn.Module) -> list[str]:
    """What the names of the networks begin with that see the images; of an FPN its ``bottom_up``.

    Returns:
        Mostly one; [""] for a model that has no part of Detectron2's ``Backbone``.
    """
    names = [name for name, part in model.named_modules() if isinstance(part, Backbone)]
    prefixes = [f"{name}." if name else "" for name in names]
    innermost = [p for p in prefixes if not any(q != p and q.startswith(p) for q in prefixes)]
    return innermost or [""]


def tensors_only(state: Any, path: str | Path) -> dict[str, Tensor]:
    """A state dict with arrays as tensors.

    Raises:
        WeightsError: it is none.
    """
    if not isinstance(state, dict):
        raise WeightsError(f'{path} holds a {type(state).__name__} under "model", no state dict.')
    result = OrderedDict()
    for name, value in state.items():
        if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
            value = torch.from_numpy(value)
        if not isinstance(name, str) or not isinstance(value, Tensor):
            raise WeightsError(
                f"{path} is no file of weights: {name!r} in it is a {type(value).__name__} and not "
                'a tensor; name a state dict, or a file that holds one under "model".'
            )
        result[name] = value
    return _with_metadata(result, state)


def _with_metadata(state: OrderedDict, source: Mapping[str, Any]) -> OrderedDict:
    """The versions of modules, by which some of Detectron2's convert old states."""
    metadata = getattr(source, "_metadata", None)
    if metadata is not None:
        state._metadata = OrderedDict(
            (_stripped(name, _WRAPPERS), versions) for name, versions in metadata.items()
        )
    return state


def _parts(names: Iterable[str], prefix: str) -> set[str]:
    """The first words of the names that begin with a prefix, such as stem and res2."""
    return {name[len(prefix) :].split(".")[0] for name in names if name.startswith(prefix)}


def named_as_in(
    own: Mapping[str, Tensor],
    prefix: str | None,
    state: Mapping[str, Tensor],
    path: str | Path,
) -> dict[str, Tensor]:
    """The tensors of a file under the names that they have in a model.

    Args:
        own: the model's state dict.
        prefix: of the backbone in it; None to leave the names of backbones as they are.
        state: the file's.
        path: its path, for messages.

    Returns:
        ``state`` under other names: those of the backbone by :func:`bare_name`, whatever they were
        called in the file; all others without wrappers.

    Raises:
        WeightsError: two tensors would get the same name.
    """
    parts = set() if prefix is None else _parts(own, prefix)
    result: OrderedDict[str, Tensor] = OrderedDict()
    before: dict[str, str] = {}
    for name, tensor in state.items():
        bare = bare_name(name)
        new = prefix + bare if bare.split(".")[0] in parts else _stripped(name, _WRAPPERS)
        if new in result:
            raise WeightsError(
                f"{path} is ambiguous: {before[new]} and {name} in it could both be {new}; keep "
                "one of them."
            )
        result[new] = tensor
        before[new] = name
    return _with_metadata(result, state)


@dataclass(frozen=True)
class Fit:
    """How the tensors of a file fit those of a model; true if all do.

    Attributes:
        wanted: how many tensors the model has.
        missing: those that the file has not.
        reshaped: those of another shape, with that in the file and that in the model.
        unexpected: tensors in the file that belong to the same parts and are not in the model.
    """

    wanted: int
    missing: tuple[str, ...]
    reshaped: Mapping[str, tuple[list[int], list[int]]]
    unexpected: tuple[str, ...]

    def __bool__(self) -> bool:
        return not (self.missing or self.reshaped or self.unexpected)

    def sentences(self) -> list[str]:
        """What is wrong, tensor by tensor."""
        return [
            *(
                f"{name} has shape {there} in the file, another shape than {here} in the model"
                for name, (there, here) in self.reshaped.items()
            ),
            *(f"{name} is missing" for name in self.missing),
            *(f"{name} is in the file alone" for name in self.unexpected),
        ]

    def summary(self) -> str:
        """How many tensors are wrong, and the first of them."""
        failing = len(self.missing) + len(self.reshaped)
        extra = f" and {len(self.unexpected)} are too many" if self.unexpected else ""
        return (
            f"{failing} of its {self.wanted} tensors don't match{extra}: {listed(self.sentences())}"
        )


def compare(own: Mapping[str, Tensor], state: Mapping[str, Tensor], prefix: str = "") -> Fit:
    """Compare names and shapes of the tensors whose names begin with ``prefix``.

    Args:
        own: the model's, all of which are wanted; running statistics are, counters aren't.
        state: the file's, see :func:`named_as_in`.
    """
    wanted = [name for name in own if name.startswith(prefix) and not is_counter(name)]
    parts = _parts(wanted, prefix)
    return Fit(
        wanted=len(wanted),
        missing=tuple(name for name in wanted if name not in state),
        reshaped={
            name: (list(state[name].shape), list(own[name].shape))
            for name in wanted
            if name in state and state[name].shape != own[name].shape
        },
        unexpected=tuple(
            name
            for name in state
            if name.startswith(prefix)
            and name[len(prefix) :].split(".")[0] in parts
            and name not in own
            and not is_counter(name)
        ),
    )


def fitting(own: Mapping[str, Tensor], state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of ``state`` that ``own`` has, of the same shape."""
    both = ((name, state[name]) for name in own if name in state)
    return _with_metadata(
        OrderedDict((name, tensor) for name, tensor in both if tensor.shape == own[name].shape),
        state,
    )
