"""What an .onnx of lambda-det export finds: python detect.py detector.onnx photo.jpg."""

import json
import sys

import numpy as np
import onnxruntime
from PIL import Image


def paste(mask, box, height, width):
    """A mask [side, side] within its box as one of the image: bool [height, width]."""
    x0, y0, x1, y1 = box
    cells = np.arange(len(mask))
    y = (np.arange(height)[:, None] + 0.5 - y0) / (y1 - y0) * len(cells) - 0.5
    x = (np.arange(width)[:, None] + 0.5 - x0) / (x1 - x0) * len(cells) - 0.5
    rows, columns = (np.maximum(0, 1 - np.abs(places - cells)) for places in (y, x))  # bilinear
    return rows @ mask @ columns.T >= 0.5


session = onnxruntime.InferenceSession(sys.argv[1])
about = session.get_modelmeta().custom_metadata_map
if about["resizes"] != "true" or "nms" in about["outside"]:
    sys.exit(f"the file takes {about['input']}; export one without --outside, --batch and --fixed")
names = json.loads(about["classes"])  # null where they are not known
outputs = [output.name for output in session.get_outputs()]
image = np.asarray(Image.open(sys.argv[2]).convert("RGB"))
found = dict(zip(outputs, session.run(None, {"image": image}), strict=True))
for i, score in enumerate(found["scores"]):
    if score >= 0.5:  # those below about["score_threshold"] are left out in the file
        number, box = found["classes"][i], found["boxes"][i]
        print(names[number] if names else number, f"{score:.2f}", *box.round(1))
        if "masks" in found:
            mask = found["masks"][i]
            if about["pasted"] != "true":
                mask = paste(mask[0], box, *image.shape[:2])
            print("   a mask of", mask.sum(), "pixels")
