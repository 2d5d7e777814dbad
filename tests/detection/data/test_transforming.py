"""Images and objects that are transformed in less time, against Detectron2's way."""

from pathlib import Path

import numpy as np
import pytest
import shapely
import torch
from detectron2.data import DatasetMapper, detection_utils
from detectron2.data import transforms as T
from detectron2.structures import BoxMode
from PIL import Image
from torch.nn import functional as F

from lambda_det.detection.data import TolerantMapper, large_scale_jitter
from lambda_det.detection.data.transforming import (
    CHANNELS,
    ImageFile,
    Outline,
    Placement,
    draws_by_size,
    placed,
)

RGB = CHANNELS["RGB"]
JITTER = [*large_scale_jitter(0.1, 2.0, 100), T.RandomFlip()]


def image(height, width, seed=0):
    """Smooth colours with edges: noise of a few pixels, and rectangles."""
    rng = np.random.default_rng(seed)
    noise = rng.normal(size=(height // 4 + 2, width // 4 + 2, 3)).astype(np.float32) * 60 + 128
    noise = torch.from_numpy(noise).permute(2, 0, 1)[None]
    smooth = F.interpolate(noise, (height, width), mode="bicubic")[0].permute(1, 2, 0).numpy()
    pixels = smooth.clip(0, 255).astype(np.uint8)
    pixels[height // 3 : height // 2, width // 4 : width // 2] = (250, 5, 90)
    return pixels


@pytest.fixture
def write(tmp_path):
    def write_image(pixels, kind="PNG", mode="RGB", **options):
        path = tmp_path / f"image.{kind.lower()}"
        Image.fromarray(pixels).convert(mode).save(path, kind, **options)
        return str(path)

    return write_image


def drawn(augmentations, size, seed=0):
    """The transforms that are drawn by the size of an image alone."""
    np.random.seed(seed)
    return T.AugmentationList(augmentations)(Outline(*size))


def both(path, transforms, image_format="RGB"):
    """An image in our way and in Detectron2's, as int [3, H, W]."""
    file = ImageFile(path)
    place = Placement.of(file.size, transforms)
    ours = placed(*file.decode(place.resized), place, CHANNELS[image_format])
    theirs = transforms.apply_image(detection_utils.read_image(path, image_format))
    return ours.int(), torch.from_numpy(theirs.astype(np.int32)).permute(2, 0, 1)


def test_augmentations_that_look_at_pixels_are_not_drawn_by_size():
    assert draws_by_size(T.AugmentationList(JITTER))
    assert not draws_by_size(T.AugmentationList([*JITTER, T.RandomBrightness(0.5, 2)]))
    assert not draws_by_size(T.AugmentationList([T.CropTransform(0, 0, 5, 5)]))


@pytest.mark.parametrize("image_format", ["BGR", "RGB"])
@pytest.mark.parametrize("flip", [{"horizontal": True}, {"horizontal": False, "vertical": True}])
def test_what_is_not_enlarged_has_detectron2_s_pixels(write, image_format, flip):
    path = write(image(150, 203))
    for scale in (0.1, 0.37, 1.0):
        augmentations = [*large_scale_jitter(scale, scale, 203), T.RandomFlip(prob=1.0, **flip)]
        ours, theirs = both(path, drawn(augmentations, (150, 203)), image_format)
        assert ours.shape == (3, 203, 203) and torch.equal(ours, theirs)


@pytest.mark.parametrize("scale", [1.01, 1.3, 2.0])
def test_an_enlarged_image_is_within_a_level_of_detectron2_s_and_of_float64(write, scale):
    pixels = image(97, 131)
    path = write(pixels)
    for seed in range(4):
        transforms = drawn([*large_scale_jitter(scale, scale, 131), *JITTER[2:]], (97, 131), seed)
        ours, theirs = both(path, transforms)
        assert (ours - theirs).abs().max() <= 1
        resize, *rest = transforms.transforms
        exact = torch.from_numpy(pixels).permute(2, 0, 1)[None].double()
        exact = F.interpolate(exact, (resize.new_h, resize.new_w), mode="bilinear")[0]
        exact = T.TransformList(rest).apply_image(exact.permute(1, 2, 0).numpy())
        assert np.abs(ours.numpy() - exact.transpose(2, 0, 1)).max() < 1


@pytest.mark.parametrize("scale", [0.06, 0.12, 0.24, 0.26, 0.6])
@pytest.mark.parametrize("size", [(403, 601), (400, 600)])
def test_a_jpeg_that_shrinks_is_close_and_in_its_place(write, scale, size):
    """At a half, a fourth or an eighth of its size, too, where the last pixel is cut."""
    path = write(image(*size), "JPEG", quality=95)
    ours, theirs = both(path, drawn(large_scale_jitter(scale, scale, 601, pad=False), size))
    difference = (ours - theirs).abs().double()
    assert (0 < difference.mean() < 3) if scale < 0.25 else (difference.max() == 0)
    # Half a pixel to any side would be further off than where it is
    for shift in ((0, 1), (1, 0), (0, -1), (-1, 0)):
        halfway = (theirs + torch.roll(theirs, shift, (1, 2))) / 2
        assert (ours - halfway)[:, 2:-2, 2:-2].abs().mean() > difference[:, 2:-2, 2:-2].mean()


@pytest.mark.parametrize(("mode", "end"), [("L", b""), ("CMYK", b""), ("RGB", b"rubbish" * 9)])
def test_jpegs_of_other_kinds_are_read_as_detectron2_reads_them(write, mode, end):
    path = write(image(80, 120), "JPEG", mode)
    data = Path(path).read_bytes()
    Path(path).write_bytes(data[:-2] + end + data[-2:])
    ours, theirs = both(path, drawn(large_scale_jitter(0.7, 0.7, 120), (80, 120)))
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "transforms",
    [
        [T.HFlipTransform(30), T.ResizeTransform(20, 30, 40, 60)],
        [T.ResizeTransform(20, 30, 40, 60), T.ResizeTransform(40, 60, 20, 30)],
        [T.ResizeTransform(20, 30, 40, 60, Image.NEAREST)],
        [T.PadTransform(1, 0, 0, 0)],
        [T.BlendTransform(np.zeros(1), 0.5, 0.5)],
    ],
)
def test_other_transforms_have_no_placement(transforms):
    assert Placement.of((20, 30), T.TransformList(transforms)) is None


# ---------------------------------------------------------------------------------------- objects


def star(rng, size):
    """A polygon that does not cross itself, somewhere on an image, or a little outside."""
    angles = np.sort(rng.uniform(0, 2 * np.pi, rng.integers(3, 20)))
    radius = rng.uniform(2, 30) * rng.uniform(0.3, 1, len(angles))
    middle = rng.uniform(-0.1, 1.1, 2) * size[::-1]
    points = middle + radius[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)
    shape = shapely.Polygon(points)
    return points if shape.is_valid and shape.area > 1 else star(rng, size)


def instance(rng, size):
    polygons = [star(rng, size) for _ in range(rng.integers(1, 3))]
    corners = np.concatenate(polygons)
    return {
        "bbox": [*corners.min(0).tolist(), *corners.max(0).tolist()],
        "bbox_mode": BoxMode.XYXY_ABS,
        "category_id": int(rng.integers(80)),
        "segmentation": [p.reshape(-1).tolist() for p in polygons],
        "keypoints": [v for _ in range(3) for v in (*rng.uniform(0, size[::-1]), 2)],
    }


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("masks", "form"), [(True, "polygon"), (True, "bitmask"), (False, "polygon")]
)
def test_a_sample_is_that_of_detectron2_s_mapper(write, tmp_path, masks, form, seed):
    rng, size = np.random.default_rng(seed), (120, 160)
    Image.fromarray(rng.integers(0, 9, size, dtype=np.uint8)).save(tmp_path / "labels.png")
    record = {
        "file_name": write(image(*size)),
        "sem_seg_file_name": str(tmp_path / "labels.png"),
        "height": size[0],
        "width": size[1],
        "annotations": [instance(rng, size) for _ in range(6)],
        "proposal_boxes": rng.uniform(0, 60, (5, 2)).repeat(2, 1) + np.array([0, 0, 20, 20]),
        "proposal_objectness_logits": np.arange(5.0),
        "proposal_bbox_mode": BoxMode.XYXY_ABS,
    }
    samples = []
    for kind in (TolerantMapper, DatasetMapper):
        mapper = kind(
            is_train=True,
            augmentations=JITTER,
            image_format="BGR",
            use_instance_mask=masks,
            instance_mask_format=form,
            use_keypoint=True,
            keypoint_hflip_indices=np.array([0, 2, 1]),
            precomputed_proposal_topk=4,
            recompute_boxes=masks,
        )
        np.random.seed(seed)
        samples.append(mapper(record))
    ours, theirs = samples
    assert set(ours) == set(theirs)
    assert (ours["image"].int() - theirs["image"].int()).abs().max() <= 1
    assert ours["image"].is_contiguous() and ours["image"].dtype == torch.uint8
    torch.testing.assert_close(ours["sem_seg"], theirs["sem_seg"], rtol=0, atol=0)
    for name in ("proposals", "instances"):
        ours, theirs = (sample[name].get_fields() for sample in samples)
        assert ours.keys() == theirs.keys()
        for field, value in ours.items():
            values = [value, theirs[field]]
            if field == "gt_masks":
                values = [v.crop_and_resize(ours["gt_boxes"].tensor, 28).float() for v in values]
            values = [getattr(v, "tensor", v) for v in values]
            torch.testing.assert_close(*values, rtol=1e-5, atol=1e-4)
