"""Read the labels of annotation tools into COCO's format.

The table of the formats is in ``table.py``; each has a module with a function that reads it. The
readers are ours: labelformat 0.1.17 has none for LabelMe and VIA, needs the class names of Pascal
VOC beforehand, and reads only the boxes of CVAT. Each object keeps its file and line, which
messages then name.
"""

from lambda_det.first_use import names_of

__getattr__ = names_of(
    __name__,
    {
        "as_coco": "own_data.labels.conversion",
        "as_single_class": "own_data.labels.conversion",
        "give_all_classes": "own_data.labels.conversion",
        "only": "own_data.labels.conversion",
        "read_labels": "own_data.labels.conversion",
        "other_labels": "own_data.labels.formats",
        "recognise": "own_data.labels.formats",
        "COCO": "own_data.labels.table",
        "FORMATS": "own_data.labels.table",
    },
)
