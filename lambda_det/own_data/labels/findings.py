"""What readers of labels repair, leave out or doubt; it is part of the content that they make."""

from __future__ import annotations

from lambda_det.detection.data.report import DOUBTFUL, NOTED, REFUSED, REPAIRED, Kind
from lambda_det.errors import printable

_LONGEST_TYPE = 40  # letters of the type of a shape

NO_IMAGE = Kind(DOUBTFUL, "labels without an image that can be read, which are left out")
OTHER_LIST = Kind(DOUBTFUL, "list of names that has another name for a class, and is not used")
SHARED = Kind(DOUBTFUL, "label file of two images of one name; both have its objects")
ATTRIBUTE = Kind(DOUBTFUL, "object whose class is of another attribute than in most objects")
JOINED = Kind(NOTED, "shapes of one class and group, which are one object")
POSES = Kind(NOTED, "points of poses after boxes, which are not used; data.yaml has no kpt_shape")
NO_FILE = Kind(NOTED, "image without a label file")
LOST_FILE = Kind(
    DOUBTFUL,
    "label file that may be lost, as in a copy that was not finished; one without an object would "
    "say that nothing is in its image",
)
EMPTY_FILE = Kind(NOTED, "empty label file, by which nothing is in its image")
FAR = Kind(NOTED, "label file in another folder, found by the name of its image")
NO_LABELS = Kind(NOTED, "image without labels of this format, which is not used")
UNREAD = Kind(REFUSED, "labels that cannot be read")
NO_CLASS = Kind(NOTED, "shape called __ignore__, which is left out")
DIFFICULT = Kind(NOTED, "object marked as difficult, which is an object like the others")
EMPTY_MASK = Kind(REPAIRED, "empty mask, which its rectangle replaces")
RENAMED = Kind(REPAIRED, "labels that name another image than the one to which they belong")
OTHER_NAME = Kind(REFUSED, "labels that have the name of one image and name another one")


def unread_shape(shape: str) -> Kind:
    """The finding of shapes of a type that the reader does not read, such as a point or a line.

    Args:
        shape: the type, as the file calls it.
    """
    return Kind(NOTED, f"{printable(shape)[:_LONGEST_TYPE]}: type of shape that is not read")
