"""Draw predicted and annotated instances."""

from __future__ import annotations

import colorsys
import itertools
import warnings
from collections.abc import Sequence
from typing import Any

import cv2
import numpy as np
from detectron2.data.catalog import Metadata
from detectron2.structures import BoxMode, Instances
from detectron2.utils.visualizer import Visualizer
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.text import Text

from lambda_det.detection.run_masks import RunMasks
from lambda_det.detection.tiles import Tile
from lambda_det.errors import printable

# The caption above a picture: its height in pixels, and font and scale for OpenCV
_CAPTION_HEIGHT = 26
_CAPTION_FONT = (cv2.FONT_HERSHEY_SIMPLEX, 0.55)
_CAPTION_MARGIN = 6  # at both sides, in pixels
# The legend, in pixels: height of a row, width of a usual letter, and width beside a name
_LEGEND_ROW, _LETTER_WIDTH, _PATCH_WIDTH = 26, 10, 40


def draw_predictions(
    image: np.ndarray,
    instances: Instances,
    class_names: Sequence[str] | None = None,
    scale: float = 1.0,
    metadata: Metadata | None = None,
    *,
    with_labels: bool = True,
) -> np.ndarray:
    """Draw boxes, masks, keypoints, classes and scores.

    Each class has one colour in all pictures, and none is dark. A box has a black outline, so that
    it is seen on any picture, and the lines of small boxes are thinner. A box lies above those of
    lower scores, and a label above all boxes.

    Args:
        image: [H, W, 3] uint8, BGR.
        instances: on the CPU, the highest scores first, with ``pred_boxes``, ``pred_classes``,
            ``scores`` and maybe ``pred_masks`` [N, H, W], a tensor or RunMasks, and
            ``pred_keypoints`` [N, K, 3].
        class_names: of all classes; None draws the indices. That of an only class is left out,
            because it says nothing and hides small objects.
        scale: size of the picture relative to the image.
        metadata: defines the lines between keypoints.
        with_labels: write classes and scores.

    Returns:
        [H * scale, W * scale, 3] uint8, BGR.
    """
    classes = instances.pred_classes.tolist()
    labels = [
        f"{_name(class_names, index)} {score:.0%}".strip()
        for index, score in zip(classes, instances.scores.tolist(), strict=True)
    ]
    masks = instances.pred_masks if instances.has("pred_masks") else None
    if masks is not None and (scale < 1 or isinstance(masks, RunMasks)):
        runs = RunMasks.of(masks)
        masks = [runs.polygons(number) for number in range(len(runs))]
    elif masks is not None:
        masks = list(masks.numpy())  # 0.85 of the time of their outlines, at 1000 x 1500 pixels
    keypoints = instances.pred_keypoints.numpy() if instances.has("pred_keypoints") else None
    boxes = instances.pred_boxes.tensor.numpy()
    if scale < 1:
        # matplotlib would first draw the whole image, in some 8 GB for one of 100 megapixels
        # rounded as Detectron2 does, so that two drawings of an image have one size
        height, width = (max(int(scale * side + 1e-2), 1) for side in image.shape[:2])
        image = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
        boxes = boxes * scale
        if masks is not None:
            masks = [[np.multiply(polygon, scale) for polygon in outline] for outline in masks]
        if keypoints is not None:
            keypoints = keypoints * [scale, scale, 1]
        scale = 1.0
    return draw_objects(
        image,
        boxes,
        classes,
        labels if with_labels else None,
        masks,
        keypoints,
        scale,
        metadata,
        are_best_first=True,
    )


def draw_ground_truth(
    image: np.ndarray,
    annotations: Sequence[dict[str, Any]],
    class_names: Sequence[str] | None = None,
    scale: float = 1.0,
    metadata: Metadata | None = None,
) -> np.ndarray:
    """Draw the annotations of a Detectron2 dataset dict. Crowds are labelled as such.

    Where other annotations have masks, the box of an annotation without one is drawn as its mask.
    The other arguments and the result are those of :func:`draw_predictions`.
    """
    boxes, masks, classes, labels, keypoints = [], [], [], [], []
    for annotation in annotations:
        box = BoxMode.convert(annotation["bbox"], annotation["bbox_mode"], BoxMode.XYXY_ABS)
        x0, y0, x1, y1 = box
        boxes.append(box)
        masks.append(annotation.get("segmentation") or [[x0, y0, x1, y0, x1, y1, x0, y1]])
        crowd = " (crowd)" if annotation.get("iscrowd") else ""
        classes.append(annotation["category_id"])
        labels.append((_name(class_names, annotation["category_id"]) + crowd).strip())
        keypoints.append(np.reshape(annotation.get("keypoints") or [], (-1, 3)))
    most = max(map(len, keypoints), default=0)
    # Objects without keypoints get keypoints of visibility 0, which are not drawn
    padded = [np.pad(points, ((0, most - len(points)), (0, 0))) for points in keypoints]
    boxes = np.array(boxes).reshape(-1, 4)
    if not any(annotation.get("segmentation") for annotation in annotations):
        masks = None
    points = np.stack(padded) if most else None
    return draw_objects(image, boxes, classes, labels, masks, points, scale, metadata)


def draw_objects(
    image: np.ndarray,
    boxes: np.ndarray,
    classes: Sequence[int],
    labels: Sequence[str] | None = None,
    masks: Any = None,
    keypoints: np.ndarray | None = None,
    scale: float = 1.0,
    metadata: Metadata | None = None,
    *,
    are_best_first: bool = False,
) -> np.ndarray:
    """Draw boxes in the colours of their classes, which :func:`draw_legend` names.

    Args:
        image: [H, W, 3] uint8, BGR.
        boxes: [N, 4], x0, y0, x1, y1 in pixels.
        classes: N numbers.
        labels: N texts; None for none.
        masks: of a form that Detectron2 draws; None for none.
        keypoints: [N, K, 3]; None for none.
        scale, metadata: as of :func:`draw_predictions`.
        are_best_first: a box lies above those after it, and its label gets its place before theirs.

    Returns:
        [H * scale, W * scale, 3] uint8, BGR.
    """
    output = _Visualizer(image[:, :, ::-1], metadata or Metadata(), scale).overlay_instances(
        boxes=boxes,
        labels=labels,
        masks=masks,
        keypoints=keypoints,
        assigned_colors=[_color(index) for index in classes],
    )
    frames = [patch for patch in output.ax.patches if isinstance(patch, Rectangle)]
    labelled = [*zip(output.ax.texts, frames, strict=False)]  # [] without labels
    for text in output.ax.texts:
        text.set_parse_math(False)  # names may have a $ in them
    if are_best_first:
        # Detectron2 drew them, and the labels where there are any, in the order of their areas
        order = np.argsort(-np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)).tolist()
        for place, frame in zip(order, frames, strict=True):
            frame.set_zorder(_BEST_BOX - place / len(order))
        labelled = [pair for _, pair in sorted(zip(order, labelled, strict=False))]
    _put_labels(labelled)
    return np.ascontiguousarray(output.get_image()[:, :, ::-1])


def draw_legend(
    classes: Sequence[int], class_names: Sequence[str] | None, width: int
) -> np.ndarray:
    """The colours of classes with their names, which may be in any script that the font has.

    Args:
        classes: numbers, each once.
        class_names: of all classes; None draws the numbers.
        width: of the picture in pixels.

    Returns:
        [height, width, 3] uint8, BGR, as high as the names need.
    """
    names = [str(i) if class_names is None else printable(class_names[i]) for i in classes]
    longest = max(map(len, names), default=0)
    columns = max(1, width // (_LETTER_WIDTH * longest + _PATCH_WIDTH))
    height = _LEGEND_ROW * -(-len(names) // columns)
    figure = Figure(figsize=(width / 100, max(height, 1) / 100), dpi=100)
    canvas = FigureCanvasAgg(figure)
    for place, (index, name) in enumerate(zip(classes, names, strict=True)):
        row, column = divmod(place, columns)
        x, y = column * width / columns, height - _LEGEND_ROW * (row + 1)
        figure.add_artist(
            Rectangle((x + 6, y + 6), 16, _LEGEND_ROW - 12, color=_color(index), transform=None)
        )
        middle = y + _LEGEND_ROW / 2
        figure.text(x + 28, middle, name, va="center", transform=None, parse_math=False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")  # which the font lacks
        canvas.draw()
    return np.ascontiguousarray(np.asarray(canvas.buffer_rgba())[:, :, 2::-1])


def fullest_crop(boxes: np.ndarray, size: tuple[int, int], side: int) -> Tile:
    """The crop of a picture, around the middle of a box, that shows the middles of most boxes.

    Args:
        boxes: [N, 4], x0, y0, x1, y1 in pixels; without a box the crop is the middle.
        size: height and width of the picture.
        side: of the crop in pixels; less where the picture has less.
    """
    height, width = size
    if not len(boxes):
        boxes = np.array([[0, 0, width, height]])
    middles = (boxes[:, :2] + boxes[:, 2:]) / 2
    own = np.minimum(side, [width, height])
    best, most = None, -1
    for middle in middles:
        start = np.clip(middle - own / 2, 0, [width, height] - own).astype(int)
        shown = ((middles >= start) & (middles <= start + own)).all(1).sum()
        if shown > most:
            best, most = Tile(*start.tolist(), *(start + own).tolist()), shown
    return best


def _name(class_names: Sequence[str] | None, index: int) -> str:
    """The name in a picture; "" for the only class."""
    if not class_names:
        return str(index)
    return printable(class_names[index]) if len(class_names) > 1 else ""


def _put_labels(labelled: Sequence[tuple[Text, Rectangle]]) -> None:
    """Move each label to the nearest place at its box where it neither covers a label before it
    nor hides a box; one without such a place is left out.
    """
    # x0, y0, x1, y1 in pixels of the picture, with y upwards
    boxes = np.array([box.get_window_extent().extents for _, box in labelled]).reshape(-1, 4)
    kept, most = boxes, _HIDDEN * np.prod(boxes[:, 2:] - boxes[:, :2], axis=1)
    for (label, _), (x0, y0, x1, y1) in zip(labelled, boxes, strict=True):
        extent = label.get_window_extent().padded(_LABEL_MARGIN)
        (width, height), start = extent.size, extent.min
        columns = (x0, x1 - width, x1, x0 - width)
        rows = (y1 - height, y1 - 2 * height, y1, y0 - height, y0)
        places = np.array([start, *itertools.product(columns, rows)])
        places = places[np.argsort(np.linalg.norm(places - start, axis=1), kind="stable")]
        places = np.clip(places, 0, np.maximum(label.figure.bbox.size - extent.size, 0))
        ends = np.minimum(places[:, None] + extent.size, kept[:, 2:])
        covered = np.maximum(ends - np.maximum(places[:, None], kept[:, :2]), 0).prod(2)
        is_free = (covered <= most).all(1)
        if not is_free.any():
            label.set_visible(False)
            continue
        place = places[is_free.argmax()]
        kept = np.vstack([kept, [*place, *(place + extent.size)]])
        most = np.append(most, 0)
        transform = label.get_transform()
        position = transform.transform(label.get_position()) + place - start
        label.set_position(transform.inverted().transform(position))


# In matplotlib's order, where masks are 1, keypoints 2 and labels 10; other boxes are above 3
_BEST_BOX = 4
_LABEL_MARGIN = 1  # of the patch behind a label, in pixels
_HIDDEN = 0.25  # the largest part of a box that a label hides


class _Visualizer(Visualizer):
    """Detectron2's, with boxes that are visible on any picture and do not hide small objects."""

    def __init__(self, image: np.ndarray, metadata: Metadata, scale: float) -> None:
        super().__init__(image, metadata, scale)
        # Detectron2 rounds it down, and to 0 where a picture is enlarged more than ten times
        self._default_font_size = max(self._default_font_size, _FONT_SIZE / scale)

    def draw_box(self, box_coord: Sequence[float], edge_color: tuple[float, ...]) -> None:
        x0, y0, x1, y1 = box_coord
        thickest = max(self._default_font_size / 4, 1)
        side = self.output.scale * min(x1 - x0, y1 - y0)
        width = min(max(_OF_THE_SIDE * side, 1), thickest * self.output.scale)
        self.output.ax.add_patch(
            Rectangle(
                (x0, y0),
                x1 - x0,
                y1 - y0,
                fill=False,
                edgecolor=edge_color,
                linewidth=width,
                path_effects=[withStroke(linewidth=2 * width, foreground="black")],
            )
        )


_FONT_SIZE = 10  # the least of the largest label, in points of the picture
_OF_THE_SIDE = 0.05  # width of a line, as a share of the shorter side of its box


def _color(index: int) -> tuple[float, float, float]:
    """The colour of a class, RGB from 0 to 1; after the table far in hue from its neighbours."""
    # Detectron2's palette has black, white and dark colours among its first 80
    if index < len(_COLOURS):
        return to_rgb(_COLOURS[index])
    return colorsys.hsv_to_rgb((_MAGENTA + 0.618 * index) % 1, (0.9, 0.6)[index % 2], 1.0)


_MAGENTA = 5 / 6
# Each is, of all that are neither dark nor grey (lightness from 0.55, chroma from 0.1), the one
# farthest from those before it in Oklab (https://bottosson.github.io/posts/oklab). The first is
# magenta, because few objects have that colour.
_COLOURS = (
    *("#ff22ff", "#00ff00", "#996600", "#0066ff", "#77ddff", "#ffbb11", "#ff0055", "#00aa00"),
    *("#aa88cc", "#9900ff", "#ffbbff", "#bbffaa", "#22aaaa", "#bb3399", "#ff8888", "#00dd99"),
    *("#bb9944", "#4499ff", "#338855", "#ff77dd"),
)


def captioned(picture: np.ndarray, text: str) -> np.ndarray:
    """Add a white strip with a line of text above a picture [H, W, 3].

    The picture becomes wider where the text needs it.
    """
    text = printable(text)  # OpenCV ends the process at a name that is no Unicode
    (width, _), _ = cv2.getTextSize(text, *_CAPTION_FONT, 1)
    missing = max(0, width + 2 * _CAPTION_MARGIN - picture.shape[1])
    picture = cv2.copyMakeBorder(
        picture, _CAPTION_HEIGHT, 0, 0, missing, cv2.BORDER_CONSTANT, value=(255, 255, 255)
    )
    place = (_CAPTION_MARGIN, 18)
    return cv2.putText(picture, text, place, *_CAPTION_FONT, (0, 0, 0), 1, cv2.LINE_AA)
