"""The one table of what must be known about meta architectures, heads and evaluators.

Your own head is registered with Detectron2. Register it here as well if it has keys or numbers of
classes of its own, or cannot be exported::

    register("my_head", Head(names=("MyROIHeads",), module="my_project.heads"))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from detectron2.evaluation import (
    CityscapesInstanceEvaluator,
    CityscapesSemSegEvaluator,
    DatasetEvaluator,
    LVISEvaluator,
    PascalVOCDetectionEvaluator,
)
from torch import nn

from lambda_det.weights.loading import CLASS_LAYERS

_INSTANCES = ("instances",)


@dataclass(frozen=True)
class Architecture:
    """A meta architecture of Detectron2 or of a project.

    Attributes:
        predictions: some of "instances", "semantic" and "panoptic".
        num_classes: the key with the number of classes of instances; "" if unknown.
        base_lr: the learning rate of Detectron2's baselines for a step of 16 images, from which
            recipes start; 0: no recipe fits it.
        anchor_maps: the key that names the maps with anchors; "" where there are none.
    """

    predictions: tuple[str, ...] = _INSTANCES
    num_classes: str = ""
    base_lr: float = 0.0
    anchor_maps: str = ""


@dataclass(frozen=True)
class Head:
    """Heads, and what else a project adds to a configuration.

    Attributes:
        names: beginnings of the values that name it, such as "PointRend" of PointRendROIHeads.
        module: is imported where a configuration has one of ``names`` or ``sections``.
        add_config: the function of the module that adds its keys; "" for none.
        sections: its keys, and the sections that hold them.
        num_classes: its keys with the number of classes, beside the architecture's.
        class_layers: a pattern of its layers, by their names in the model, whose shape depends on
            the number of classes; they start afresh when the classes change.
        not_exported: names of module classes that a graph cannot hold, and why.
    """

    names: tuple[str, ...] = ()
    module: str = ""
    add_config: str = ""
    sections: tuple[str, ...] = ()
    num_classes: tuple[str, ...] = ()
    class_layers: str = ""
    not_exported: tuple[tuple[str, ...], str] = ((), "")


@dataclass(frozen=True)
class Evaluator:
    """The evaluation of an evaluator_type of Detectron2's data sets.

    Attributes:
        ground_truth: which of "instances", "semantic" and "panoptic" the data have.
        install: the command that installs a package that it also needs, whose last word is also the
            name of its module; "" for none.
        make: makes the evaluator from a data set's name, the tasks of COCO's kind and a folder for
            its files; None for COCO's measures of everything that is predicted and in the data.
    """

    ground_truth: tuple[str, ...] = _INSTANCES
    install: str = ""
    make: Callable[[str, Sequence[str], str], DatasetEvaluator] | None = None


# architectures of other projects are expected to predict instances, as most do
_ROI_CLASSES, _RPN_MAPS = "MODEL.ROI_HEADS.NUM_CLASSES", "MODEL.RPN.IN_FEATURES"
ARCHITECTURES = {
    "FCOS": Architecture(),
    "GeneralizedRCNN": Architecture(_INSTANCES, _ROI_CLASSES, 0.02, _RPN_MAPS),
    "PanopticFPN": Architecture(
        ("instances", "semantic", "panoptic"), _ROI_CLASSES, 0.02, _RPN_MAPS
    ),
    "ProposalNetwork": Architecture(base_lr=0.02, anchor_maps=_RPN_MAPS),
    "RetinaNet": Architecture(
        _INSTANCES, "MODEL.RETINANET.NUM_CLASSES", 0.01, "MODEL.RETINANET.IN_FEATURES"
    ),
    "SemanticSegmentor": Architecture(("semantic",), base_lr=0.01),  # of the DeepLab project
}

HEADS = {
    "DeepLab": Head(
        names=(
            "DeepLabV3",
            "build_lambda_resnet_deeplab",
            "build_resnet_deeplab",
        ),
        module="detectron2.projects.deeplab",
        add_config="add_deeplab_config",
        sections=(
            "MODEL.RESNETS.RES4_DILATION",
            "MODEL.RESNETS.RES5_MULTI_GRID",
        ),
    ),
    "PointRend": Head(
        names=("PointRend", "ImplicitPointRend", "StandardPointHead"),
        module="detectron2.projects.point_rend",
        add_config="add_pointrend_config",
        sections=(
            "MODEL.POINT_HEAD",
            "MODEL.IMPLICIT_POINTREND",
            "MODEL.ROI_MASK_HEAD.POINT_HEAD_ON",
        ),
        num_classes=("MODEL.POINT_HEAD.NUM_CLASSES",),
        class_layers=r"roi_heads\.mask_head\.(coarse_head\.prediction|point_head\.\w+)",
        not_exported=(
            ("PointRendMaskHead",),
            "PointRend refines masks in a loop that ends early when nothing is detected, and a "
            "graph would hold only one of both ways",
        ),
    ),
}

# The evaluators by evaluator_type. A data set that was registered without one is evaluated as COCO.
EVALUATORS = {
    None: Evaluator(),
    "coco": Evaluator(),
    "coco_panoptic_seg": Evaluator(("instances", "semantic", "panoptic")),
    "sem_seg": Evaluator(("semantic",)),
    "lvis": Evaluator(
        # It asks for opencv-python, which would overwrite the files of the headless one
        install="pip install --no-deps lvis",
        make=lambda name, tasks, folder: LVISEvaluator(name, tasks=tasks, output_dir=folder),
    ),
    "pascal_voc": Evaluator(make=lambda name, tasks, folder: PascalVOCDetectionEvaluator(name)),
    "cityscapes_instance": Evaluator(
        install="pip install cityscapesscripts",
        make=lambda name, tasks, folder: CityscapesInstanceEvaluator(name),
    ),
    "cityscapes_sem_seg": Evaluator(
        ("semantic",),
        install="pip install cityscapesscripts",
        make=lambda name, tasks, folder: CityscapesSemSegEvaluator(name),
    ),
}


def register(name: str, entry: Architecture | Head | Evaluator) -> None:
    """Register an entry, before a configuration is read.

    Args:
        name: the class of a meta architecture, an evaluator_type of data sets, or any name of a
            head.
        entry: replaces an entry with this name.
    """
    tables = {Architecture: ARCHITECTURES, Evaluator: EVALUATORS, Head: HEADS}
    next(table for kind, table in tables.items() if isinstance(entry, kind))[name] = entry
    if isinstance(entry, Head) and entry.class_layers:
        CLASS_LAYERS.append(entry.class_layers)


def class_keys() -> Iterator[str]:
    """The keys of YAML that hold the number of classes of instances."""
    yield from dict.fromkeys(a.num_classes for a in ARCHITECTURES.values() if a.num_classes)
    for head in HEADS.values():
        yield from head.num_classes


def why_not_exported(model: nn.Module) -> str:
    """Why a graph cannot hold a part of a model; "" where all can be exported."""
    bases = {base.__name__ for module in model.modules() for base in type(module).__mro__}
    reasons = (head.not_exported for head in HEADS.values())
    return next((why for names, why in reasons if bases.intersection(names)), "")


CLASS_LAYERS.extend(head.class_layers for head in HEADS.values() if head.class_layers)
