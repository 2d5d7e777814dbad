"""Read the labels of annotation tools into COCO's format.

The table of the formats is in ``formats.py``; each has a module with a function that reads it. The
readers are ours: labelformat 0.1.17 has none for LabelMe and VIA, needs the class names of Pascal
VOC beforehand, and reads only the boxes of CVAT. Each object keeps its file and line, which
messages then name.
"""

from lambda_det.own_data.labels.conversion import (
    as_coco,
    as_single_class,
    give_all_classes,
    only,
    read_labels,
)
from lambda_det.own_data.labels.formats import (
    COCO,
    FORMATS,
    other_labels,
    recognise,
    refuse_address,
)

__all__ = [
    "COCO",
    "FORMATS",
    "as_coco",
    "as_single_class",
    "give_all_classes",
    "only",
    "other_labels",
    "read_labels",
    "recognise",
    "refuse_address",
]
