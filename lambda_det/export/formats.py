"""The formats: how a network is written in each, and how the file runs when it is read again."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from detectron2.export.torchscript_patch import patch_builtin_len
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config

from lambda_det.errors import ConfigError
from lambda_det.export.detections import exportable_detections
from lambda_det.export.networks import Network, takes_rgb
from lambda_det.export.onnx_file import (
    AXES,
    Runner,
    missing_packages,
    onnx_metadata,
    openvino_metadata,
    read_onnx,
    read_openvino,
    write_onnx,
)

__all__ = ["FORMATS", "Format", "format_of", "why_not"]

torch._meta_registrations.div_rtn = lambda x, y: x // y  # as of 2.15; it asked for the remainder
HOLDS_ANY_SIZE = hasattr(_config, "backed_size_oblivious")  # one graph; PyTorch 2.7 or newer


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        name: as people call it.
        suffix: of its files.
        read: a function from the input to the outputs by name, out of a file and their names.
        write: writes a network, for an example of its input, to a path; None where another program
            makes the file, out of ours.
        about: what a file says of itself; None where that is in a file beside it.
    """

    name: str
    suffix: str
    read: Callable[[Path, list[str], torch.device], Runner]
    write: Callable[[Network, tuple[Tensor, ...], Path], None] | None = None
    about: Callable[[Path], dict[str, Any]] | None = None


def format_of(path: str | Path) -> Format:
    """The format of a file to write, which its suffix names.

    Raises:
        ConfigError: it names none.
    """
    form = FORMATS.get(Path(path).suffix)
    if form is None or form.write is None:
        known = ", ".join(f"{key} ({form.name})" for key, form in FORMATS.items() if form.write)
        raise ConfigError(f"{path} says no format by its ending; end it in one of {known}.")
    return form


def _write_torchscript(network: Network, example: tuple[Tensor, ...], path: Path) -> None:
    with torch.no_grad(), patch_builtin_len():
        traced = torch.jit.trace(network.module, example, strict=False, check_trace=False)
        torch.jit.save(traced, str(path))


def _read_torchscript(path: Path, names: list[str], device: torch.device) -> Runner:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit", FutureWarning)
        return torch.jit.load(str(path), map_location=device)


def _program(network: Network, example: tuple[Tensor, ...], least: int = 1) -> ExportedProgram:
    """The graph for any number of images of any size, from ``least`` on, that the network supports.

    The graph of a detector asks whether the last map has one position. With an FPN it has one if
    both sides have 64 pixels or fewer.
    """
    batch = Dim(AXES[0], min=1)
    sides = [Dim(name, min=-(-least // network.stride)) for name in AXES[1:]]
    if network.stride > 1:
        sides = [network.stride * side for side in sides]
    one = network.detector and network.batch is None
    first = (not one) + (not takes_rgb(network.outside))  # where the height is
    sizes = {} if network.fixed else dict(enumerate(sides, first))
    free = {} if one or network.batch else {0: batch}
    shapes = ({**sizes, **free}, free)[: len(example)]
    form = exportable_detections if network.detector else nullcontext
    with (
        torch.no_grad(),
        _config.patch(backed_size_oblivious=True),  # for sizes of 1, too
        form(),
    ):
        return torch.export.export(network.module, example, dynamic_shapes=shapes, strict=False)


def _write_torch_export(network: Network, example: tuple[Tensor, ...], path: Path) -> None:
    torch.export.save(_program(network, example), str(path))


def _read_torch_export(path: Path, names: list[str], device: torch.device) -> Runner:
    return torch.export.load(str(path)).module()


def _write_onnx(network: Network, example: tuple[Tensor, ...], path: Path) -> None:
    with torch.no_grad():
        names = [name.removeprefix("pred_") for name in network.original(*example)]
    alone = network.batch is None and "resize" in network.outside
    inputs = ["image"] if alone else ["images", "sizes"][: len(example)]
    # by finish_onnx
    replaced = {"boxes": "resize" not in network.outside, "masks": network.pasted}
    names = [f"found_{name}" if replaced.get(name) else name for name in names]
    # Older PyTorch wants maps of two positions; the file does not
    least = 1 if torch.__version__ >= "2.14" else 129
    write_onnx(_program(network, example, least), inputs, names, path)


def why_not(form: Format, network: Network) -> str | None:
    """Why a network cannot be written in a format; None where it can."""
    suffix = form.suffix
    if suffix != ".onnx" and (network.batch is not None or network.outside or network.pasted):
        return (
            "only ONNX (.onnx) holds detectors of batches and of fixed sizes, with parts outside, "
            "or with pasted masks"
        )
    if suffix == ".ts":
        return None
    if suffix == ".onnx" and (missing := missing_packages()):
        return f"it needs other packages: pip install {' '.join(missing)}"
    if not HOLDS_ANY_SIZE:
        return (
            f"PyTorch {torch.__version__} can only hold one graph for maps of more than one tile "
            "and another for smaller ones; use PyTorch 2.7 or newer, or TorchScript (.ts)"
        )
    heads = getattr(network.module.model, "roi_heads", None) if network.detector else None
    if getattr(heads, "keypoint_on", False):
        return (
            "Detectron2's keypoint heads take the number of boxes on an image out of the graph; "
            "use TorchScript (.ts), or export only the backbone"
        )
    if network.detector and heads is None and suffix == ".pt2":
        return (
            "the graph would refuse images whose last map has one position, which are those of up "
            "to 128 pixels for RetinaNet; use ONNX (.onnx) or TorchScript (.ts)"
        )
    return None


FORMATS: dict[str, Format] = {
    form.suffix: form
    for form in (
        Format("TorchScript", ".ts", _read_torchscript, _write_torchscript),
        Format("torch.export", ".pt2", _read_torch_export, _write_torch_export),
        Format("ONNX", ".onnx", read_onnx, _write_onnx, onnx_metadata),
        Format("OpenVINO", ".xml", read_openvino, about=openvino_metadata),
    )
}
