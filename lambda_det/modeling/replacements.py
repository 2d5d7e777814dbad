"""What stands in the place of a network's 3x3 convolutions: lambda layers, or a baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from detectron2.layers import get_norm
from torch import nn

from lambda_det.errors import ConfigError
from lambda_det.layers import LambdaLayer, RelativePosition
from lambda_det.layers.attention import (
    AugmentedConvolution,
    AxialAttention,
    GlobalAttention,
    LocalAttention,
)
from lambda_det.modeling.specs import STAGES, ResNetSpec

__all__ = ["Replacements", "layer_arguments"]

SHARING = ("", "stage", "size")
HEADS = 8  # of attention
_Size = tuple[int, int] | None
_MakeNorm = Callable[[int], nn.Module]
# By what ResNetSpec.attention names; of channels, the largest map, and what makes norms within
ATTENTION: dict[str, Callable[[int, _Size, _MakeNorm], nn.Module]] = {
    "global": lambda dim, size, norm: GlobalAttention(dim, HEADS, size),
    "axial": lambda dim, size, norm: AxialAttention(dim, HEADS, size, norm),
    "local": lambda dim, size, norm: LocalAttention(dim, HEADS, 7),
    "augmented": lambda dim, size, norm: AugmentedConvolution(dim, HEADS, size),
}


def attention_norm(norm: str | _MakeNorm, channels: int) -> nn.Module:
    """The network's norm for channels within attention; nothing where the network has none.

    Raises:
        ConfigError: it does not divide so many channels.
    """
    try:
        return get_norm(norm, channels) or nn.Identity()
    except ValueError as error:
        raise ConfigError(
            f"NORM is {norm!r}, which cannot be made for the {channels} channels within axial "
            f"attention ({error}); take BN or SyncBN."
        ) from error


def layer_arguments(
    norm: str | Callable[[int], nn.Module],
    *,
    qv_norm: bool = True,
    position: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Arguments of a :class:`LambdaLayer` in a network.

    Args:
        norm: the network's.
        qv_norm: whether queries and values have it (Table 11).
        position: False for content lambdas alone (Table 9).
        options: of the layer.
    """
    if not position:
        options["scope"] = None
    return {"norm": partial(get_norm, norm) if qv_norm else "", **options}


class Replacements:
    """Makes the lambda layers of a network, one for each block that has one.

    Args:
        spec: the architecture.
        norm: a name that Detectron2's ``get_norm`` knows, or a function from channels to a module.
        stage_scopes: scopes of res2 to res5, where they differ (Appendix B).
        global_context: side of the largest image in pixels; the position lambdas then span the
            whole map of such an image instead of a local scope (Table 10).
        share_positions: "stage" lets the lambda layers of a stage share their position embeddings,
            "size" all that get maps of one size, which adds the first block of the next stage.
            Files of earlier versions have True for "stage" and False for "".
        options: as of :func:`layer_arguments`, over those of ``spec``.

    Raises:
        ConfigError: the options contradict each other, or the network has no lambda layers.
    """

    def __init__(
        self,
        spec: ResNetSpec,
        norm: str | Callable[[int], nn.Module] = "BN",
        *,
        stage_scopes: Sequence[int] = (),
        global_context: int | None = None,
        share_positions: Literal["", "stage", "size"] | bool = "",
        **options: Any,
    ) -> None:
        if isinstance(share_positions, bool):
            share_positions = "stage" if share_positions else ""
        reaches = {
            "scope": options.get("scope") is not None,
            "stage_scopes": bool(stage_scopes),
            "global_context": bool(global_context),
            "position False": not options.get("position", True),
        }
        reaches = [name for name, given in reaches.items() if given]
        given = [*options, *(name for name in reaches if name not in options)]
        given += ["share_positions"] * bool(share_positions)
        unknown = given
        if spec.attention:  # that over a whole map is made for images of one size
            unknown = [n for n in given if n != "global_context" or not spec.global_context]
        elif any(spec.lambda_blocks.values()):
            unknown = []
        if unknown:
            raise ConfigError(
                f"{', '.join(unknown)}: options of lambda layers, which this network doesn't have; "
                "leave them out."
            )
        if len(reaches) > 1:
            raise ConfigError(
                f"{' and '.join(reaches)} of the lambda layers contradict each other; give one."
            )
        if stage_scopes and len(stage_scopes) != len(STAGES):
            raise ConfigError(
                f"stage_scopes is {list(stage_scopes)}, but must hold {len(STAGES)} numbers, for "
                f"{', '.join(STAGES)}."
            )
        if share_positions not in SHARING:
            raise ConfigError(
                f"share_positions is {share_positions!r}, but must be one of {list(SHARING)}."
            )
        if not reaches and "scope" not in options:
            global_context = spec.global_context
        self.global_context, self.share_positions = global_context, share_positions
        self.scopes = dict(zip(STAGES, stage_scopes, strict=False))
        self.attention, self.norm = spec.attention, norm
        self.options = layer_arguments(norm, **{**spec.layer, **options})
        self._shared: dict[Any, RelativePosition | None] = {}

    def make(self, stage: str, channels: int, *, stride: int, dilation: int = 1) -> nn.Module:
        """The layer of the next block.

        Args:
            stage: "res2" to "res5".
            channels: in and out.
            stride: of the map that the layer gets, in pixels of the image.
            dilation: of a local scope.
        """
        side = self.global_context and -(-self.global_context // stride)
        if self.attention:
            make_norm = partial(attention_norm, self.norm)
            return ATTENTION[self.attention](channels, side and (side, side), make_norm)
        options = dict(self.options)
        if stage in self.scopes:
            options["scope"] = self.scopes[stage]
        if side:
            options |= {"scope": None, "map_size": (side, side)}
        place = (
            stage if self.share_positions == "stage" else (stride, dilation, options.get("scope"))
        )
        position = self._shared.get(place) if self.share_positions else None
        layer = LambdaLayer(channels, dilation=dilation, position=position, **options)
        self._shared[place] = layer.position
        return layer
