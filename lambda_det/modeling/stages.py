"""The stages of a LambdaResNet: which block has which stride, dilation and layer."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from lambda_det.errors import ConfigError
from lambda_det.layers import RelativePosition
from lambda_det.modeling.blocks import Bottleneck, Norm
from lambda_det.modeling.specs import STAGES, ResNetSpec

__all__ = ["check_dilation", "make_stage", "stage_channels"]


def stage_channels(name: str) -> int:
    """Output channels of a stage: 256 of res2 to 2048 of res5."""
    return 256 * 2 ** STAGES.index(name)


def check_dilation(
    spec: ResNetSpec, dilation: Mapping[str, int] | None, multi_grid: Sequence[int] | None
) -> dict[str, int]:
    """The dilation of each stage.

    Raises:
        ConfigError: a stage that cannot be dilated, a dilation below that of the stage before, or
            a multi-grid that does not fit the blocks of res5.
    """
    dilation = dict(dilation or {})
    for name, value in dilation.items():
        if name not in STAGES[1:] or type(value) is not int or value < 1:
            raise ConfigError(
                f"The dilation of {name} is {value!r}; {', '.join(STAGES[1:])} can have whole "
                "numbers from 1."
            )
    result = {name: dilation.get(name, 1) for name in STAGES}
    for before, name in itertools.pairwise(STAGES):
        if result[name] < result[before]:
            raise ConfigError(
                f"The dilation of {name} is {result[name]}, less than the {result[before]} of "
                f"{before}, and would narrow what the positions see; give at least that."
            )
    if multi_grid is not None and (len(multi_grid) != spec.blocks[-1] or min(multi_grid) < 1):
        raise ConfigError(
            f"MODEL.RESNETS.RES5_MULTI_GRID is {list(multi_grid)}, but res5 of this network has "
            f"{spec.blocks[-1]} blocks; give as many whole numbers from 1."
        )
    return result


def make_stage(
    spec: ResNetSpec,
    name: str,
    in_channels: int,
    *,
    stride: int,
    norm: Norm,
    layer: Mapping[str, Any] | None = None,
    share_positions: bool = False,
    map_size: Sequence[tuple[int, int]] | None = None,
    dilation: Sequence[int] | None = None,
    stochastic_depth: float = 0.0,
) -> list[Bottleneck]:
    """The bottleneck blocks of one stage.

    Args:
        spec: the architecture.
        name: "res2" to "res5".
        in_channels: channels of its input.
        stride: of the first block.
        norm: as in :class:`Bottleneck`.
        layer: options of the lambda layers over those of ``spec``.
        share_positions: let the lambda layers share their position embeddings.
        map_size: for global embeddings, the largest map that the first block gets, and that which
            the others get.
        dilation: of each block; 1 by default.
        stochastic_depth: as in :class:`Bottleneck`.
    """
    index = STAGES.index(name)
    options = {**spec.layer, **(layer or {})}
    position: RelativePosition | None = None
    blocks: list[Bottleneck] = []
    for number in range(1, spec.blocks[index] + 1):
        lambda_options = None
        if spec.has_lambda(name, number):
            lambda_options = {**options, "position": position}
            if map_size is not None and position is None:
                lambda_options["map_size"] = map_size[number > 1]
        block = Bottleneck(
            in_channels,
            stage_channels(name),
            bottleneck_channels=stage_channels(name) // 4,
            stride=stride if number == 1 else 1,
            dilation=1 if dilation is None else dilation[number - 1],
            norm=norm,
            lambda_options=lambda_options,
            se=name in spec.se_stages,
            pooled_shortcut=spec.design == "rs",
            stochastic_depth=stochastic_depth,
        )
        if share_positions and lambda_options is not None:
            position = block.conv2.position
        blocks.append(block)
        in_channels = stage_channels(name)
    return blocks
