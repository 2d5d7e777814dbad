"""A model repository of Triton Inference Server around an ONNX file."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from lambda_det.export.onnx_file import read_session
from lambda_det.files import writing_to

__all__ = ["MOST", "write_repository"]

MOST = 8  # images at once, where a file takes any number
WAIT = 5_000  # microseconds for others to come
_TYPES = {name: name.upper() for name in ("bool", "uint8", "int32", "int64")} | {"float": "FP32"}


def write_repository(path: Path, folder: Path) -> Path:
    """Write ``folder/NAME/config.pbtxt`` and ``1/model.onnx`` for a file NAME.onnx.

    Requests are batched where the file takes any number of images. Their other sizes must then be
    equal, as those of a fixed size are.

    Returns:
        The configuration.

    Raises:
        ConfigError: it cannot be written.
    """
    session = read_session(path, optimized=False)
    ends = {"input": session.get_inputs(), "output": session.get_outputs()}
    free = ends["input"][0].shape[0] == "batch"
    lines = [
        f'name: "{path.stem}"',
        'backend: "onnxruntime"',
        f"max_batch_size: {MOST if free else 0}",
    ]
    lines += [f"{kind} {_tensor(end, free)}" for kind, list_ in ends.items() for end in list_]
    if free:
        lines.append(f"dynamic_batching {{ max_queue_delay_microseconds: {WAIT} }}")
    made = folder / path.stem
    with writing_to(made / "1/model.onnx"):
        shutil.copyfile(path, made / "1/model.onnx")
        (made / "config.pbtxt").write_text("\n".join(lines) + "\n", "utf-8")
    return made / "config.pbtxt"


def _tensor(end: Any, batched: bool) -> str:
    """An input or output: the first size is left out where Triton makes batches."""
    sizes = [size if isinstance(size, int) else -1 for size in end.shape][batched:]
    kind = _TYPES[end.type.removeprefix("tensor(").removesuffix(")")]
    # Triton knows no tensor without sizes
    shape = f"dims: {sizes}" if sizes else "dims: [1] reshape { shape: [] }"
    return f'{{ name: "{end.name}" data_type: TYPE_{kind} {shape} }}'
