"""How far the outputs of a file differ from its network's, and how far they may."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

__all__ = ["TOLERANCE", "alike", "differences"]

TOLERANCE = 1e-4  # float32 sums in another order, and kernels rounded to float32
_LEAST = 1e-30  # what a map of zeros is divided by; trained maps are far above it


def differences(outputs: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """The greatest difference of each expected output, as a share of its greatest absolute value.

    Networks may have maps of any size, so no difference is small by itself.

    Returns:
        By name of an expected output. Infinite where the output is missing, has another shape, or
        the expected one is not finite; NaN or infinite where only the output is not finite.
    """
    return {name: _difference(outputs.get(name), tensor) for name, tensor in expected.items()}


def _difference(output: Tensor | None, expected: Tensor) -> float:
    if output is None or output.shape != expected.shape or not expected.isfinite().all():
        return float("inf")
    if expected.numel() == 0:
        return 0.0
    output, expected = output.double().cpu(), expected.double().cpu()
    return float((output - expected).abs().max() / expected.abs().max().clamp(min=_LEAST))


def alike(errors: Mapping[str, float], tolerance: float | None = None) -> bool:
    """Whether :func:`differences` compared anything and found only errors of rounding.

    Args:
        errors: by name of an output.
        tolerance: the greatest one; None for ``TOLERANCE``.
    """
    most = TOLERANCE if tolerance is None else tolerance
    return bool(errors) and all(error <= most for error in errors.values())  # NaN is not
