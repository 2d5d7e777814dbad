"""The shapes data sets: COCO-format data made on the spot, from a seed.

Circles, rectangles and triangles of any size and turn lie over each other on textured backgrounds.
Each class keeps to two families of colour, so that a small detector tells them apart within minutes
and its AP shows whether a pipeline works at all. A second set has keypoints and patterned
backgrounds besides, for keypoint, semantic and panoptic heads.
"""

from lambda_det.detection.data.shapes.drawing import SHAPE_CLASSES
from lambda_det.detection.data.shapes.folder import SPLITS
from lambda_det.detection.data.shapes.instances import make_shapes, register_shapes
from lambda_det.detection.data.shapes.panoptic import (
    KEYPOINTS,
    STUFF_CLASSES,
    make_panoptic_shapes,
    register_panoptic_shapes,
)

__all__ = [
    "KEYPOINTS",
    "SHAPE_CLASSES",
    "SPLITS",
    "STUFF_CLASSES",
    "make_panoptic_shapes",
    "make_shapes",
    "register_panoptic_shapes",
    "register_shapes",
]
