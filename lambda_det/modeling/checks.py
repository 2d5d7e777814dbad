"""Options of networks that cannot work, each refused with a sentence."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence

from torch import nn

from lambda_det.errors import ConfigError
from lambda_det.foundation import get_norm
from lambda_det.modeling.specs import STAGES, NetworkSpec, ResNetSpec

# Keys of configurations that are not named like the option
_KEYS = {
    "dilation": "MODEL.RESNETS.RES5_DILATION",
    "multi_grid": "MODEL.RESNETS.RES5_MULTI_GRID",
    "freeze_at": "MODEL.BACKBONE.FREEZE_AT",
}


def taken_options(network: type[nn.Module], spec: NetworkSpec) -> frozenset[str]:
    """The keyword arguments of the class of a network, and those options of lambda layers that its
    specification names.
    """
    arguments = inspect.signature(network).parameters.values()
    return spec.lambda_options.union(a.name for a in arguments if a.kind is a.KEYWORD_ONLY)


def check_options(
    network: type[nn.Module], spec: NetworkSpec, given: Iterable[str], name: str = "This network"
) -> None:
    """Refuse options that a network does not take.

    Args:
        network: the class.
        spec: its architecture.
        given: names of options.
        name: of the network, for the message.

    Raises:
        ConfigError: the network does not take one of them.
    """
    taken = taken_options(network, spec)
    refused = [option for option in given if option not in taken]
    if refused:
        keys = ", ".join(_KEYS.get(option, option.upper()) for option in refused)
        raise ConfigError(
            f"{name} takes no {', '.join(refused)}; leave these out (in a configuration {keys}, at "
            "the default), or take another network."
        )


def check_norm(norm: str | Callable[[int], nn.Module]) -> None:
    """Refuse a norm.

    Raises:
        ConfigError: Detectron2 knows none of that name.
    """
    try:
        get_norm(norm, 32)
    except KeyError as error:
        raise ConfigError(
            f"NORM is {norm!r}, which Detectron2 doesn't know; it has BN, SyncBN, FrozenBN, GN, "
            "nnSyncBN, naiveSyncBN, naiveSyncBN_N, LN and '' for none."
        ) from error


def check_probability(name: str, value: float) -> None:
    """Refuse a probability with which a layer or block would never be trained.

    Raises:
        ConfigError: it is below 0, or 1 or more; the message has the ``name`` of the key.
    """
    if not 0 <= value < 1:
        raise ConfigError(
            f"{name} is {value}, but as the probability of leaving something out it must be at "
            "least 0 and below 1."
        )


def check_out_features(out_features: Sequence[str] | None, available: Sequence[str]) -> list[str]:
    """``out_features`` as a list; the last of ``available`` for None.

    Raises:
        ConfigError: there are none, or a name is not one of ``available``.
    """
    chosen = list(available[-1:] if out_features is None else out_features)
    if not chosen or not set(chosen) <= set(available):
        raise ConfigError(f"OUT_FEATURES is {chosen}; name some of {', '.join(available)}.")
    return chosen


def check_dilation(
    spec: ResNetSpec, dilation: Mapping[str, int] | None, multi_grid: Sequence[int] | None
) -> dict[str, int]:
    """The dilation of each stage.

    Args:
        spec: the network.
        dilation: by stage; 1 for a stage that is not named.
        multi_grid: a factor of the dilation for each block of res5; None for 1.

    Raises:
        ConfigError: a stage that cannot be dilated, a dilation below the one of the stage before,
            or a multi-grid that does not fit the blocks of res5.
    """
    dilation = dict(dilation or {})
    result = {name: dilation.get(name, 1) for name in STAGES}
    numbers = list(result.values())
    whole = all(type(number) is int for number in numbers)
    if not (whole and set(dilation) <= {*STAGES[1:]} and numbers == sorted(numbers)):
        raise ConfigError(
            f"The dilation of the stages is {dilation}; {', '.join(STAGES[1:])} can have whole "
            "numbers from 1, each at least the number of the stage before."
        )
    if multi_grid is not None and (len(multi_grid) != spec.blocks[-1] or min(multi_grid) < 1):
        raise ConfigError(
            f"MODEL.RESNETS.RES5_MULTI_GRID is {list(multi_grid)}, but res5 of this network has "
            f"{spec.blocks[-1]} blocks; give as many whole numbers from 1."
        )
    return result
