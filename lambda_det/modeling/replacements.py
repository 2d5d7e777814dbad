"""What stands in the place of a network's 3x3 convolutions: lambda layers, or a baseline."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Literal

from torch import nn

from lambda_det.config import check, one_of
from lambda_det.errors import ConfigError
from lambda_det.foundation import get_norm
from lambda_det.layers import LambdaLayer, RelativePosition
from lambda_det.modeling.common import Norm
from lambda_det.modeling.specs import STAGES, ResNetSpec

MakeNorm = Callable[[int], nn.Module]  # of a number of channels
# By ResNetSpec.kind what makes the layers that blocks have in the place of lambda layers, of their
# channels, the largest map (H, W) or None, and what makes norms. They take maps [B, C, H, W] and
# return them in the same layout. If they have a ``map_size``, they hold for maps of up to that size
# and are not exported. Projects add theirs, and networks of that kind to SPECS, when they are
# imported (projects/paper/lambda_paper/attention.py).
KINDS: dict[str, Callable[[int, tuple[int, int] | None, MakeNorm], nn.Module]] = {}


def layer_arguments(
    norm: Norm,
    *,
    qv_norm: bool = True,
    position: bool = True,
    **options: Any,
) -> dict[str, Any]:
    """Arguments of a :class:`LambdaLayer` in a network.

    Args:
        norm: the network's.
        qv_norm: whether queries and values have it (Table 11).
        position: False for only content lambdas (Table 9).
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
        options: as of :func:`layer_arguments`, over those of ``spec``.

    Raises:
        ConfigError: the options contradict each other.
    """

    def __init__(
        self,
        spec: ResNetSpec,
        norm: Norm,
        *,
        stage_scopes: Sequence[int] = (),
        global_context: int | None = None,
        share_positions: Literal["", "stage", "size"] = "",
        **options: Any,
    ) -> None:
        reaches = {
            "scope": options.get("scope") is not None,
            "stage_scopes": bool(stage_scopes),
            "global_context": bool(global_context),
            "position": not options.get("position", True),
        }
        reaches = [name for name, given in reaches.items() if given]
        if len(reaches) > 1:
            raise ConfigError(
                f"{' and '.join(reaches)} of the lambda layers contradict each other; give one."
            )
        if stage_scopes and len(stage_scopes) != len(STAGES):
            raise ConfigError(
                f"stage_scopes is {list(stage_scopes)}, but must hold {len(STAGES)} numbers, for "
                f"{', '.join(STAGES)}."
            )
        check("share_positions", share_positions, one_of("", "stage", "size"))
        if not reaches and "scope" not in options:
            global_context = spec.global_context
        self.global_context, self.share_positions = global_context, share_positions
        self.scopes = dict(zip(STAGES, stage_scopes, strict=False))
        self.kind, self.norm = KINDS[spec.kind] if spec.kind else None, norm
        self.options = layer_arguments(norm, **{**spec.layer, **options})
        self._shared: dict[Any, RelativePosition | None] = {}

    def make(self, stage: str, channels: int, *, stride: int, dilation: int = 1) -> nn.Module:
        """The layer of the next block that has one.

        Args:
            stage: "res2" to "res5".
            channels: in and out.
            stride: of the map that the layer gets, in pixels of the image.
            dilation: of a local scope.
        """
        side = self.global_context and -(-self.global_context // stride)
        if self.kind is not None:
            return self.kind(
                channels,
                side and (side, side),
                lambda channels: get_norm(self.norm, channels) or nn.Identity(),
            )
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
