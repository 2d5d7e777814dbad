"""The words in which a step speaks of its images, losses and memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from lambda_det.errors import ConfigError, listed

__all__ = ["file_names", "listed_losses", "memory_errors_in_words", "of_images"]

_IMAGES_NAMED = 8


def file_names(data: list[dict]) -> list[str]:
    """The files of a batch of Detectron2's, where it names them."""
    images = [image for image in data if isinstance(image, dict)]
    return [str(image["file_name"]) for image in images if "file_name" in image]


def of_images(images: list[str]) -> str:
    """The first few of the images, in brackets after the place where something happened."""
    return f" (images {listed(images, _IMAGES_NAMED)})" if images else ""


def listed_losses(losses: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in losses.items())


@contextmanager
def memory_errors_in_words() -> Iterator[None]:
    """Turn a lack of GPU memory into a sentence on what to set.

    Raises:
        ConfigError: in place of the error.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        raise ConfigError(
            "The memory of the GPU is too small for a step: raise SOLVER.ACCUMULATE_GRADIENTS, "
            "which divides the step into smaller batches, or set CHECKPOINT_ACTIVATIONS of the "
            "model True."
        ) from error
