"""The files that an export writes: the ONNX file, and what comes beside it."""

from __future__ import annotations

from pathlib import Path

from lambda_det.errors import ConfigError
from lambda_det.files import refuse_existing


def sidecar(path: Path) -> Path:
    """The JSON file beside an exported network."""
    return path.with_name(f"{path.name}.json")


def check_output(output: Path, overwrite: bool) -> None:
    """Refuse a name under which an exported file cannot be written.

    Args:
        output: the file.
        overwrite: it and what comes beside it may be replaced.

    Raises:
        ConfigError: the name has another ending, or is there already.
    """
    if output.suffix != ".onnx":
        raise ConfigError(f"{output} must end in .onnx, the format of what is exported.")
    for path in (output, sidecar(output)):
        refuse_existing(path, overwrite)
