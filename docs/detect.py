"""Predict with an .onnx of lambda-det export: python detect.py detector.onnx photo.jpg."""

import argparse
import json

import numpy as np
import onnxruntime
from PIL import Image


def resized(image, shortest, longest, fixed):
    """The image as in the evaluation of the run, and smaller where it would not fit."""
    width, height = image.size
    scale = min(shortest / min(width, height) if shortest else 1, longest / max(width, height))
    if fixed:
        scale = min(scale, fixed[0] / height, fixed[1] / width)
    sides = (max(int(side * scale + 0.5), 1) for side in (width, height))
    return np.asarray(image.resize(tuple(sides), Image.Resampling.BILINEAR))


def paste(mask, box, height, width):
    """Paste a mask [side, side] within its box into the image: bool [height, width]."""
    x0, y0, x1, y1 = box
    cells = np.arange(len(mask))
    y = (np.arange(height)[:, None] + 0.5 - y0) / (y1 - y0) * len(cells) - 0.5
    x = (np.arange(width)[:, None] + 0.5 - x0) / (x1 - x0) * len(cells) - 0.5
    rows, columns = (np.maximum(0, 1 - np.abs(places - cells)) for places in (y, x))  # bilinear
    return rows @ mask @ columns.T >= 0.5


parser = argparse.ArgumentParser(description="Print what a detector finds in a photo.")
parser.add_argument("detector", help="an .onnx that lambda-det export wrote")
parser.add_argument("photo", help="of any format that Pillow reads")
args = parser.parse_args()
session = onnxruntime.InferenceSession(args.detector)
about = session.get_modelmeta().custom_metadata_map
shortest, longest, fixed, stride, batch, names = (
    json.loads(about[key])
    for key in ("min_size_test", "max_size_test", "fixed", "stride", "batch", "classes")
)
photo = Image.open(args.photo).convert("RGB")
image = resized(photo, shortest, longest, fixed)
height, width = image.shape[:2]
canvas = fixed or (height + -height % stride, width + -width % stride)
images = np.zeros((batch or 1, *canvas, 3), np.uint8)
sizes = np.ones((batch or 1, 2), np.int32)
images[0, :height, :width], sizes[0] = image, (height, width)
outputs = [output.name for output in session.get_outputs()]
values = session.run(None, {"images": images, "sizes": sizes})
result = {name: value[0] for name, value in zip(outputs, values, strict=True)}
to_photo = np.tile([photo.width / width, photo.height / height], 2)
for i in range(result["count"]):
    score, number, box = result["scores"][i], result["classes"][i], result["boxes"][i] * to_photo
    if score >= 0.5:  # those below about["score_threshold"] are left out in the file
        print(names[number] if names else number, f"{score:.2f}", *box.round(1))
        if "masks" in result:
            mask = paste(result["masks"][i, 0], box, photo.height, photo.width)
            print("   a mask of", mask.sum(), "pixels")
