"""Image files to pixels: what Pillow makes of them, faster for most."""

from __future__ import annotations

import io

import numpy as np
import simplejpeg
from PIL import Image

from lambda_det.errors import DataError

# Of JPEGs with these, simplejpeg and Pillow make the same RGB: both decode with libjpeg-turbo. They
# turn CMYK into RGB differently.
_COLOURS = ("YCbCr", "RGB", "Gray")


def decode_image(data: bytes, name: str) -> np.ndarray:
    """The pixels that ``PIL.Image.open(file).convert("RGB")`` has; EXIF data turn nothing.

    Plain JPEGs go through simplejpeg, which is a fifth faster. Pillow decodes all else, whatever
    the file's extension says, and judges the JPEGs that simplejpeg warns about.

    Args:
        data: the content of an image file.
        name: of the file, for messages.

    Returns:
        uint8 RGB [H, W, 3], C-contiguous and writable.

    Raises:
        DataError: Pillow cannot read the image, or refuses it as a decompression bomb.
    """
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(data)
        if colours in _COLOURS and height * width <= (Image.MAX_IMAGE_PIXELS or np.inf):
            return simplejpeg.decode_jpeg(data)
    except ValueError:  # no JPEG, or not a sound one
        pass
    return _decode_with_pillow(data, name)


def _decode_with_pillow(data: bytes, name: str) -> np.ndarray:
    try:
        with Image.open(io.BytesIO(data)) as image:
            return np.array(image.convert("RGB"))
    except Exception as error:  # on a broken file Pillow raises what it likes
        if isinstance(error, Image.UnidentifiedImageError):
            reason = "no image format that is known"  # Pillow's text names the BytesIO object
        else:
            reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(
            f"The image {name} cannot be read ({reason}); fetch it again or take it out of the "
            "data."
        ) from error
