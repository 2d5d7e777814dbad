"""Read the labels of annotation tools into COCO's format.

The table of the formats is in ``table.py``; each has a module with a function that reads it. The
readers are ours: labelformat 0.1.17 has none for LabelMe and VIA, needs the class names of Pascal
VOC beforehand, and reads only the boxes of CVAT. Each object keeps its file and line, which
messages then name.
"""
