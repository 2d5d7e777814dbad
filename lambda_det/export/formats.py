"""The formats: how each writes a network, and how its file runs when it is read again."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import torch
from torch import Tensor
from torch.export import Dim, ExportedProgram
from torch.fx.experimental import _config

from lambda_det.errors import ConfigError
from lambda_det.export.detections import exportable_detections
from lambda_det.export.networks import Network
from lambda_det.export.onnx_file import (
    AXES,
    OPSET,
    PACKAGES,
    finish_onnx,
    read_onnx,
    write_onnx,
)

__all__ = ["FORMATS", "Format", "Runner", "format_of"]

HOLDS_ANY_SIZE = hasattr(_config, "backed_size_oblivious")  # one graph; PyTorch 2.7 or newer


class Runner(Protocol):
    """A file as a function, which is compared with ``Network.original``."""

    def __call__(self, *inputs: Tensor) -> Mapping[str, Tensor]:
        """The outputs of the file for the inputs of the network.

        Args:
            inputs: as :class:`lambda_det.export.networks.Network` takes them, on its device.

        Returns:
            A dict or another mapping from names to tensors of any dtype, on any device. It has all
            names of the original's outputs, with their shapes, because each of these is compared;
            others are ignored. A format that keeps only the order of the outputs takes their names
            from the arguments of ``Format.read``.

        Raises:
            Exception: of any class; the comparison then fails, and shows its first line.
        """
        ...


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        name: as people call it.
        suffix: of its files.
        write: writes a network, for an example of its inputs, to one file at a path. A RuntimeError
            says that the format cannot hold the network.
        read: makes a function of a file, given its path and the names of the network's outputs in
            their order.
        finish: writes what users must know into a file, after the comparison; None where only the
            JSON file beside it has that.
        holds_detectors: whether it holds whole detectors.
        recorded: whether it is made of a graph of :func:`record`, which needs PyTorch 2.7.
        packages: that it needs.
    """

    name: str
    suffix: str
    write: Callable[[Network, tuple[Tensor, ...], Path], None]
    read: Callable[[Path, Sequence[str]], Runner]
    finish: Callable[[Path, Mapping[str, Any]], None] | None = None
    holds_detectors: bool = False
    recorded: bool = False
    packages: tuple[str, ...] = ()

    def check(self, network: Network) -> None:
        """Raise ConfigError where a network cannot be written in this format."""
        missing = [name for name in self.packages if importlib.util.find_spec(name) is None]
        if missing:
            why = f"it needs other packages: pip install {' '.join(missing)}"
        elif network.detector and not self.holds_detectors:
            holders = [form.suffix for form in FORMATS.values() if form.holds_detectors]
            why = f"it holds backbones, and {', '.join(holders)} holds detectors"
        elif self.recorded and not HOLDS_ANY_SIZE:
            why = (
                f"PyTorch {torch.__version__} can only record one graph for maps of more than one "
                "tile and another for smaller ones; use PyTorch 2.7 or newer"
            )
        else:
            return
        raise ConfigError(f"{self.name} is not possible: {why}.")


def format_of(path: str | Path) -> Format:
    """The format that the suffix of a file to write names.

    Raises:
        ConfigError: the suffix names no format.
    """
    form = FORMATS.get(Path(path).suffix)
    if form is None:
        names = ", ".join(f"{suffix} ({form.name})" for suffix, form in FORMATS.items())
        raise ConfigError(f"{path} has an ending that names no format; use one of {names}.")
    return form


@contextmanager
def _recording() -> Iterator[None]:
    """Let PyTorch record graphs that hold for every size, also of Detectron2's detectors."""
    with (
        torch.no_grad(),
        _config.patch(backed_size_oblivious=True),  # also for sizes of 1
        # Before PyTorch 2.15 the size of a pooled map asks for the remainder of a division
        mock.patch.object(torch._meta_registrations, "div_rtn", lambda x, y: x // y),
        exportable_detections(),
    ):
        yield


def record(network: Network, example: tuple[Tensor, ...], least: int = 1) -> ExportedProgram:
    """Record the graph of a network for its free sizes, from ``least`` on."""
    count = {} if network.batch else {0: Dim(AXES[0], min=1)}
    sides = {}
    if not network.fixed:
        units = [Dim(name, min=-(-least // network.stride)) for name in AXES[1:]]
        axes = (1, 2) if network.detector else (2, 3)
        sides = {
            axis: network.stride * unit if network.stride > 1 else unit
            for axis, unit in zip(axes, units, strict=True)
        }
    shapes = ({**count, **sides}, count)[: len(example)]
    with _recording():
        return torch.export.export(network.module, example, dynamic_shapes=shapes, strict=False)


def _write_torch_export(network: Network, example: tuple[Tensor, ...], path: Path) -> None:
    torch.export.save(record(network, example), str(path))


def _read_torch_export(path: Path, outputs: Sequence[str]) -> Runner:
    return torch.export.load(str(path)).module()


def _write_onnx(network: Network, example: tuple[Tensor, ...], path: Path) -> None:
    with torch.no_grad():
        outputs = list(network.original(*example))
    # Before 2.14 PyTorch wants maps of two positions; the file does not
    least = 1 if torch.__version__ >= "2.14" else 129
    inputs = ["images", "sizes"][: len(example)]
    write_onnx(record(network, example, least), inputs, outputs, path)


FORMATS: dict[str, Format] = {
    form.suffix: form
    for form in (
        Format("torch.export", ".pt2", _write_torch_export, _read_torch_export, recorded=True),
        Format(
            f"ONNX, opset {OPSET}",
            ".onnx",
            _write_onnx,
            read_onnx,
            finish=finish_onnx,
            holds_detectors=True,
            recorded=True,
            packages=PACKAGES,
        ),
    )
}
