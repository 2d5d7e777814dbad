from __future__ import annotations

import pytest
import torch
from detectron2.structures import Boxes, BoxMode, Instances

from lambda_det.visualization.results import Match, match


def predicted(*entries):
    """Entries are (score, class, box)."""
    instances = Instances((100, 100))
    instances.pred_boxes = Boxes(torch.tensor([e[2] for e in entries]).reshape(-1, 4).float())
    instances.scores = torch.tensor([float(e[0]) for e in entries])
    instances.pred_classes = torch.tensor([e[1] for e in entries], dtype=torch.int64)
    return instances


def true(category, box, crowd=0):
    x0, y0, x1, y1 = box
    return {
        "bbox": [x0, y0, x1 - x0, y1 - y0],
        "bbox_mode": BoxMode.XYWH_ABS,
        "category_id": category,
        "iscrowd": crowd,
    }


BOX = (10, 10, 50, 50)
# Nearly BOX: an intersection over union of 0.9; HALF: of 0.45
NEAR, HALF = (10, 10, 50, 46), (10, 10, 50, 28)


@pytest.mark.parametrize(
    ("predictions", "truth", "expected"),
    [
        ([], [], Match(0, 0, 0)),
        ([], [true(0, BOX)], Match(0, 1, 0)),
        ([(0.9, 0, BOX)], [], Match(0, 0, 1)),
        ([(0.9, 0, NEAR)], [true(0, BOX)], Match(1, 0, 0)),
        ([(0.9, 1, NEAR)], [true(0, BOX)], Match(0, 1, 1)),
        ([(0.9, 0, HALF)], [true(0, BOX)], Match(0, 1, 1)),
        ([(0.9, 0, NEAR), (0.8, 0, BOX)], [true(0, BOX)], Match(1, 0, 1)),
        ([(0.8, 0, BOX), (0.9, 0, NEAR)], [true(0, BOX), true(0, NEAR)], Match(2, 0, 0)),
        # The better score takes what the other one needs, though it would fit the second object
        (
            [(0.8, 0, (0, 10, 40, 50)), (0.9, 0, (11, 10, 51, 50))],
            [true(0, BOX), true(0, (14, 10, 54, 50))],
            Match(1, 1, 1),
        ),
        ([(0.9, 0, (12, 12, 20, 20))], [true(0, BOX, crowd=1)], Match(0, 0, 0)),
        ([(0.9, 1, (12, 12, 20, 20))], [true(0, BOX, crowd=1)], Match(0, 0, 1)),
        ([(0.9, 0, (40, 40, 99, 99))], [true(0, BOX, crowd=1)], Match(0, 0, 1)),
    ],
)
def test_counts(predictions, truth, expected):
    assert match(predicted(*predictions), truth) == expected


def test_quality_orders_images_from_worst_to_best():
    qualities = [
        m.quality for m in (Match(0, 2, 3), Match(1, 2, 1), Match(1, 1, 0), Match(0, 0, 0))
    ]
    assert qualities == [0.0, 0.25, 0.5, 1.0]
