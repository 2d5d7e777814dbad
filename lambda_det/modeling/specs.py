"""Every named network as data, with the paper's figures for it.

The numbers of tables and figures are of the conference version (ICLR 2021).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from lambda_det.errors import ConfigError, suggest
from lambda_det.layers import LambdaLayer

ALL = "all"
Blocks = Literal["all"] | tuple[int, ...]  # of a stage, counted from 1

STAGES = ("res2", "res3", "res4", "res5")
STRIDE = 32  # of res5 of every network here, in pixels of the image


@dataclass(frozen=True)
class PaperFigures:
    """What the paper prints for a network of 1000 classes; None where it prints nothing.

    Attributes:
        params: parameters in millions.
        flops: floating point operations in billions, two per multiply-add.
        top1: ImageNet top-1 accuracy in percent.
        source: the table.
        note: printed beside the figure where the text gives another one.
    """

    params: float | None = None
    flops: float | None = None
    top1: float | None = None
    source: str = ""
    note: str = ""


# The options of lambda layers: of the layers of a network together, and of each layer
STAGE_OPTIONS = frozenset(["stage_scopes", "global_context", "share_positions"])
LAYER_OPTIONS = frozenset(
    name
    for name, parameter in inspect.signature(LambdaLayer).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY and name not in ("norm", "dilation")
) | {"qv_norm"}


@dataclass(frozen=True, kw_only=True)
class NetworkSpec:
    """What the table of networks says of one of any kind.

    Attributes:
        image_size: side of the input that the figures are for.
        paper: what the paper prints.
    """

    image_size: int = 224
    paper: PaperFigures = PaperFigures()

    @property
    def lambda_options(self) -> frozenset[str]:
        """Which options of lambda layers the network takes."""
        return frozenset()


@dataclass(frozen=True)
class ResNetSpec(NetworkSpec):
    """A ResNet with some of its 3x3 convolutions replaced by lambda layers.

    Attributes:
        blocks: bottleneck blocks in res2 to res5 (the paper's c2 to c5).
        design: of stem, shortcut and pooling: "rs" as in ResNet-RS, "vanilla" as in He et al.
            (2016), "timm" as in timm's lambda ResNets.
        lambda_blocks: by stage, which blocks have a lambda layer.
        kind: of what these blocks have instead of lambda layers, a key of
            ``KINDS`` in :mod:`lambda_det.modeling.replacements`; "" for lambda layers.
        follows: whether layers of that kind follow a block, and do not replace its 3x3 convolution.
        se_stages: stages whose blocks have squeeze-and-excitation.
        se_ratio: how much narrower its inner layer is.
        layer: options of the lambda layers that differ from the paper's default.
        global_context: side of the largest image if the position lambdas span the whole map.
        activation: "relu" or "silu".
        width: channels that the stem gives; the stages give 4, 8, 16 and 32 times as many.
    """

    blocks: tuple[int, int, int, int]
    design: Literal["rs", "vanilla", "timm"] = "rs"
    lambda_blocks: Mapping[str, Blocks] = field(default_factory=dict)
    kind: str = ""
    follows: bool = False
    se_stages: tuple[str, ...] = ()
    se_ratio: int = 4
    layer: Mapping[str, Any] = field(default_factory=dict)
    global_context: int | None = None
    activation: Literal["relu", "silu"] = "relu"
    width: int = 64

    @property
    def lambda_options(self) -> frozenset[str]:
        """All for a network with lambda layers. One with layers of another kind that span whole
        maps takes the size of these.
        """
        if any(self.lambda_blocks.values()) and not self.kind:
            return STAGE_OPTIONS | LAYER_OPTIONS
        return frozenset(["global_context"] if self.global_context else [])

    def channels(self, stage: str) -> int:
        """Output channels of a stage: 256 of res2 to 2048 of res5 at the usual width."""
        return self.width * 4 * 2 ** STAGES.index(stage)

    def has_lambda(self, stage: str, block: int) -> bool:
        """Whether the block, counted from 1, has a lambda layer."""
        blocks = self.lambda_blocks.get(stage, ())
        return blocks == ALL or block in blocks


@dataclass(frozen=True)
class MobileNetSpec(NetworkSpec):
    """MobileNet-v2 with some inverted bottlenecks, counted from 1, replaced (Appendix E.4.2)."""

    lambda_blocks: tuple[int, ...] = ()

    @property
    def lambda_options(self) -> frozenset[str]:
        return LAYER_OPTIONS if self.lambda_blocks else frozenset()


# Table 19: blocks, and the lambda layers of c4, which are uniformly spaced (Appendix F.2). All
# blocks of c5 have one.
_LAMBDA_RESNETS: dict[int, tuple[tuple[int, int, int, int], tuple[int, ...]]] = {
    26: ((2, 2, 2, 2), (2,)),  # ours, for small machines: the paper's smallest has 50 layers
    50: ((3, 4, 6, 3), (3,)),
    101: ((3, 4, 23, 3), (6, 12, 18)),
    152: ((3, 8, 36, 3), (5, 10, 15, 20, 25, 30)),
    200: ((3, 24, 36, 3), (5, 10, 15, 20, 25, 30)),
    270: ((4, 29, 53, 4), (8, 16, 24, 32, 40, 48)),
    350: ((4, 36, 72, 4), (10, 20, 30, 40, 50, 60)),
    420: ((4, 44, 87, 4), (10, 20, 30, 40, 50, 60, 70, 80)),
}

_NOT_FROM_TEXT = "the text gives another figure"
_WITH_SE = "M by the text, with squeeze-and-excitation in c4's convolution blocks"

# Image size, and the paper's figures for it as PaperFigures has them; Tables 13, 15, 16 and 18
_PAPER_RS: dict[str, tuple[Any, ...]] = {
    "lambda_resnet50": (160, None, None, 79.2, "Table 18"),
    "lambda_resnet101": (224, 36.9, None, 82.3, "Table 13", f"47.38 {_WITH_SE}"),
    "lambda_resnet101_c4": (224, 26.0, None, 82.6, "Table 13"),
    "lambda_resnet152": (256, 51.4, None, 83.4, "Table 13", f"67.17 {_WITH_SE}"),
    "lambda_resnet152_c4": (256, 35.1, None, 83.4, "Tables 13, 15", "84.0 at 320x320"),
    "lambda_resnet200_c4": (320, 42, None, 84.3, "Table 15"),
    "lambda_resnet270": (256, None, None, 84.2, "Table 18"),
    "lambda_resnet270_c4_7x7": (256, None, 34, 84.0, "Table 16", "operations: " + _NOT_FROM_TEXT),
    "lambda_resnet350": (320, None, None, 84.7, "Table 18"),
    "lambda_resnet420": (320, None, None, 84.9, "Table 18"),
    "resnet_rs101": (224, 44.6, None, 81.3, "Table 13"),
    "resnet_rs101_se": (224, 63.6, None, 81.8, "Table 13"),
    "resnet_rs152": (256, 60.2, None, 82.5, "Table 13"),
    "resnet_rs152_se": (256, 86.6, None, 83.0, "Table 13"),
}

# Table 12: the vanilla ResNet-50 with lambda layers in some stages
_PLACEMENTS: dict[str, tuple[Any, ...]] = {
    "c2": (25.5, None, 77.3, "Table 12"),
    "c23": (25.0, None, 77.2, "Table 12"),
    "c234": (21.7, None, 77.8, "Table 12"),
    "c2345": (15.0, None, 78.4, "Table 12"),
    "c345": (15.1, None, 78.3, "Table 12"),
    "c45": (15.4, 10.0, 78.3, "Tables 10, 12", _NOT_FROM_TEXT),
    "c5": (18.8, None, 77.3, "Table 12"),
}

# Table 8: (|k|, |h|, |u|) with all 3x3 convolutions replaced; the scope is 7x7 where |u| > 1. And
# parameters, top-1, and what to note
_ABLATIONS: dict[tuple[int, int, int], tuple[float, float, str]] = {
    (8, 2, 1): (14.8, 77.2, _NOT_FROM_TEXT),
    (8, 16, 1): (15.6, 77.9, _NOT_FROM_TEXT),
    (2, 4, 1): (14.7, 77.4, _NOT_FROM_TEXT),
    (4, 4, 1): (14.7, 77.6, ""),
    (8, 4, 1): (14.8, 77.9, ""),
    (32, 4, 1): (15.4, 78.4, ""),
    (2, 8, 1): (14.7, 77.8, _NOT_FROM_TEXT),
    (4, 8, 1): (14.7, 77.7, _NOT_FROM_TEXT),
    (8, 8, 1): (14.7, 77.9, ""),
    (16, 8, 1): (15.1, 78.1, ""),
    (32, 8, 1): (15.7, 78.5, _NOT_FROM_TEXT),
    (8, 8, 4): (15.3, 78.4, ""),
    (8, 8, 8): (16.0, 78.6, ""),
    (16, 4, 4): (16.0, 78.9, ""),
}


def _specs() -> dict[str, NetworkSpec]:
    specs: dict[str, NetworkSpec] = {}
    for depth, (blocks, in_c4) in _LAMBDA_RESNETS.items():
        # Appendix F.2 leaves squeeze-and-excitation out of blocks with a lambda layer. Here c4's
        # convolution blocks have none either, since only then do the counts of Table 13 come out.
        base = ResNetSpec(blocks, se_stages=("res2", "res3"))
        specs[f"lambda_resnet{depth}"] = replace(base, lambda_blocks={"res4": in_c4, "res5": ALL})
        specs[f"lambda_resnet{depth}_c4"] = replace(base, lambda_blocks={"res4": ALL, "res5": ALL})
        # ResNet-RS also has these depths, except 26 (Bello et al. 2021, Revisiting ResNets)
        plain = ResNetSpec(blocks)
        specs[f"resnet_rs{depth}"] = plain
        specs[f"resnet_rs{depth}_se"] = replace(plain, se_stages=STAGES)
    for name in ("lambda_resnet26", "resnet_rs26", "resnet_rs26_se"):
        specs[f"{name}_slim"] = replace(specs[name], width=16)
    specs["lambda_resnet270_c4_7x7"] = replace(specs["lambda_resnet270_c4"], layer={"scope": 7})
    for name, (image_size, *figures) in _PAPER_RS.items():
        specs[name] = replace(specs[name], image_size=image_size, paper=PaperFigures(*figures))

    vanilla = ResNetSpec((3, 4, 6, 3), "vanilla")
    specs["resnet50"] = replace(vanilla, paper=PaperFigures(25.6, top1=76.9, source="Table 3"))
    for placement, figures in _PLACEMENTS.items():
        stages = {f"res{digit}": ALL for digit in placement[1:]}
        paper = PaperFigures(*figures)
        specs[f"resnet50_lambda_{placement}"] = replace(vanilla, lambda_blocks=stages, paper=paper)
    everywhere = replace(vanilla, lambda_blocks=dict.fromkeys(STAGES, ALL))
    for (k, h, u), (params, top1, note) in _ABLATIONS.items():
        paper = PaperFigures(params, None, top1, "Table 8", note)
        layer = {"query_depth": k, "heads": h, "intra_depth": u, "scope": 7 if u > 1 else 23}
        specs[f"resnet50_lambda_k{k}_h{h}_u{u}"] = replace(everywhere, layer=layer, paper=paper)
    # Ours, to train many of them on a processor (projects/paper/study.py)
    for suffix in ("", *(f"_lambda_{placement}" for placement in _PLACEMENTS)):
        specs[f"resnet14_slim{suffix}"] = replace(
            specs[f"resnet50{suffix}"],
            blocks=(1, 1, 1, 1),
            width=16,
            image_size=32,
            paper=PaperFigures(),
        )
    specs["resnet50_lambda_content"] = replace(
        everywhere,
        layer={"scope": None},
        paper=PaperFigures(14.9, 5.0, 68.8, "Table 9"),
    )
    specs["resnet50_lambda_position"] = replace(
        everywhere,
        layer={"content": False},
        paper=PaperFigures(14.9, 11.9, 78.1, "Table 9", "operations: " + _NOT_FROM_TEXT),
    )

    specs["resnet50_se"] = replace(
        vanilla,
        se_stages=STAGES,
        se_ratio=16,  # by the count; Appendix F.2 has 4
        paper=PaperFigures(
            28.1, top1=77.6, source="Table 3", note="35.64 M with the text's squeeze ratio of 4"
        ),
    )

    # timm's lambda ResNets; timm publishes weights for them
    timm26 = ResNetSpec(
        (2, 2, 2, 2),
        "timm",
        lambda_blocks={"res4": (2,), "res5": ALL},
        layer={"scope": 9, "position_bias": True},
        image_size=256,
    )
    specs["lambda_resnet26t"] = timm26
    specs["lambda_resnet26rpt_256"] = replace(timm26, layer={}, global_context=256)
    specs["lambda_resnet50ts"] = replace(
        timm26,
        blocks=(3, 4, 6, 3),
        lambda_blocks={"res3": (4,), "res4": (2, 4, 6), "res5": (2,)},
        activation="silu",
    )

    specs["mobilenet_v2"] = MobileNetSpec(paper=PaperFigures(3.50, 0.603, 72.7, "Table 17"))
    specs["mobilenet_v2_lambda"] = MobileNetSpec(
        (10, 16),
        paper=PaperFigures(
            3.21,
            0.563,
            73.3,
            "Table 17",
            "|k|=32 counts all heads together; 3.24 M with 32 for each",
        ),
    )
    return specs


SPECS: dict[str, NetworkSpec] = _specs()


def list_models() -> list[str]:
    """The names of all networks."""
    return list(SPECS)


def get_spec(name: str) -> NetworkSpec:
    """The network of that name.

    Raises:
        ConfigError: there is none; the message has similar names.
    """
    if name not in SPECS:
        hint = suggest(name, SPECS)
        raise ConfigError(f"There is no model named {name!r}{hint} `lambda-det info` lists them.")
    return SPECS[name]
