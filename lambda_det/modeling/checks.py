"""Options of networks that cannot work, each refused with a sentence."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence

from torch import nn

from lambda_det.errors import ConfigError
from lambda_det.modeling.specs import STAGES, NetworkSpec, ResNetSpec

# Keys of configurations that are not named like the option
_KEYS = {
    "dilation": "MODEL.RESNETS.RES5_DILATION",
    "multi_grid": "MODEL.RESNETS.RES5_MULTI_GRID",
    "freeze_at": "MODEL.BACKBONE.FREEZE_AT",
}


def check_options(
    network: type[nn.Module], spec: NetworkSpec, given: Iterable[str], name: str = "This network"
) -> None:
    """Refuse options that are neither keyword arguments of the class of a network, nor among the
    options of lambda layers that its specification names.

    Args:
        network: the class.
        spec: its architecture.
        given: names of options.
        name: of the network, for the message.

    Raises:
        ConfigError: the network does not take one of them.
    """
    arguments = inspect.signature(network).parameters.values()
    taken = spec.lambda_options.union(a.name for a in arguments if a.kind is a.KEYWORD_ONLY)
    unknown = [option for option in given if option not in taken]
    if unknown:
        keys = ", ".join(_KEYS.get(option, option.upper()) for option in unknown)
        raise ConfigError(
            f"{name} takes no {', '.join(unknown)}; leave these out (in a configuration {keys}, at "
            "the default), or take another network."
        )


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
