from __future__ import annotations

import numpy as np

from lambda_det.classification.data.synthetic import SyntheticSource


def test_as_many_images_as_imagenet_in_the_memory_of_a_few():
    source = SyntheticSource(32)
    assert len(source) == len(source.labels) == 1281167
    assert source.classes == sorted(source.classes) and len(set(source.classes)) == 1000
    image = source.load(1281166)
    assert image.shape == (32, 32, 3) and image.dtype == np.uint8
    assert 100 < image.mean() < 155 and image.std() > 60


def test_labels_go_round_the_classes():
    source = SyntheticSource(8, classes=3, images=7)
    assert source.labels.dtype == np.int64 and source.labels.tolist() == [0, 1, 2, 0, 1, 2, 0]


def test_images_are_the_same_each_time_and_not_all_alike():
    one, two = SyntheticSource(8), SyntheticSource(8)
    assert all((one.load(index) == two.load(index)).all() for index in range(40))
    assert (one.load(0) != one.load(1)).any()
    assert one.name(3) == "noise 3"
