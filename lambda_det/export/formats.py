"""The formats: how a network is written in each, and how the file runs when it is read again."""

from __future__ import annotations

import importlib.util
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from detectron2.export.torchscript_patch import patch_builtin_len
from detectron2.modeling.meta_arch import GeneralizedRCNN
from detectron2.modeling.roi_heads import CascadeROIHeads
from torch import Tensor
from torch.fx.experimental import _config

from lambda_det.errors import ConfigError
from lambda_det.export.detections import exportable_detections
from lambda_det.export.networks import Network

__all__ = ["FORMATS", "OPSET", "Format", "format_of"]

AXES = ("batch", "height", "width")  # of a graph's input; of an FPN's, over its largest stride
OPSET = 18  # of ONNX; the one that torch.onnx writes without converting versions
HOLDS_ANY_SIZE = hasattr(_config, "backed_size_oblivious")  # one graph; PyTorch 2.7 or newer
Runner = Callable[[Tensor], dict[str, Tensor]]


@dataclass(frozen=True)
class Format:
    """A file format.

    Attributes:
        name: as people call it.
        suffix: of its files.
        refuse: says why a network can't be written in it, or None.
        write: writes a network, for an example of its input, to a path.
        read: a function from the input to the outputs by name, out of a file and their names.
    """

    name: str
    suffix: str
    refuse: Callable[[Network], str | None]
    write: Callable[[Network, Tensor, Path], None]
    read: Callable[[Path, list[str], torch.device], Runner]


def format_of(path: str | Path) -> Format:
    """The format that a file's suffix names.

    Raises:
        ConfigError: it names none.
    """
    suffix = Path(path).suffix
    if suffix not in FORMATS:
        known = ", ".join(f"{key} ({value.name})" for key, value in FORMATS.items())
        raise ConfigError(f"{path} says no format by its ending; end it in one of {known}.")
    return FORMATS[suffix]


def _write_torchscript(network: Network, example: Tensor, path: Path) -> None:
    with torch.no_grad(), warnings.catch_warnings(), patch_builtin_len():
        warnings.simplefilter("ignore")  # of every number that is a constant now, meant or not
        traced = torch.jit.trace(network.module, example, strict=False, check_trace=False)
        torch.jit.save(traced, str(path))


def _read_torchscript(path: Path, names: list[str], device: torch.device) -> Runner:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r".*torch\.jit", FutureWarning)
        return torch.jit.load(str(path), map_location=device)


def _program(network: Network, example: Tensor) -> torch.export.ExportedProgram:
    """The graph for any number of images of any size that the network supports.

    The graph of a detector asks whether the last map has one position. With an FPN it has one if
    both sides have 64 pixels or fewer.
    """
    batch, height, width = (torch.export.Dim(name, min=1) for name in AXES)
    if network.detector:
        sizes = {1: height, 2: width}
    elif network.stride == 1:
        sizes = {0: batch, 2: height, 3: width}
    else:
        sizes = {0: batch, 2: network.stride * height, 3: network.stride * width}
    with (
        torch.no_grad(),
        _config.patch(backed_size_oblivious=True),  # for sizes of 1, too
        exportable_detections() if network.detector else nullcontext(),
    ):
        return torch.export.export(
            network.module, (example,), dynamic_shapes=(sizes,), strict=False
        )


def _write_torch_export(network: Network, example: Tensor, path: Path) -> None:
    torch.export.save(_program(network, example), str(path))


def _read_torch_export(path: Path, names: list[str], device: torch.device) -> Runner:
    return torch.export.load(str(path)).module()


def _write_onnx(network: Network, example: Tensor, path: Path) -> None:
    program = _program(network, example)
    with torch.no_grad():
        names = list(network.original(example))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            program,
            f=str(path),
            dynamo=True,
            opset_version=OPSET,
            input_names=["images"],
            output_names=names,
            external_data=False,
            verbose=False,
        )
    _name_sizes(path)


def _name_sizes(path: Path) -> None:
    """Call the sizes of the input, and what is computed from them, by names instead of s77."""
    import onnx

    model = onnx.load(path)
    (images,) = model.graph.input
    sizes = [dim.dim_param for dim in images.type.tensor_type.shape.dim]
    symbols = [re.search(r"[a-z]\w*", size)[0] for size in sizes if size]  # of "32*s77"
    words = dict(zip(symbols, AXES, strict=True))
    for value in (*model.graph.input, *model.graph.output, *model.graph.value_info):
        for dim in value.type.tensor_type.shape.dim:
            for symbol, word in words.items():
                if dim.dim_param:  # to set it removes a number
                    dim.dim_param = re.sub(rf"\b{symbol}\b", word, dim.dim_param)
    onnx.save(model, path)


def _read_onnx(path: Path, names: list[str], device: torch.device) -> Runner:
    import onnxruntime

    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    (images,) = session.get_inputs()

    def run(x: Tensor) -> dict[str, Tensor]:
        outputs = session.run(names, {images.name: x.cpu().numpy()})
        return {name: torch.from_numpy(y) for name, y in zip(names, outputs, strict=True)}

    return run


def _refuse_torch_export(network: Network) -> str | None:
    if not HOLDS_ANY_SIZE:
        return (
            f"PyTorch {torch.__version__} can only hold one graph for maps of more than one tile "
            "and another for smaller ones; use PyTorch 2.7 or newer, or TorchScript (.ts)"
        )
    if network.detector and not isinstance(network.module.model, GeneralizedRCNN):
        return (
            "the number of candidates that this detector sorts depends on the image, which "
            "torch.export can't hold; use TorchScript (.ts), or export only the backbone"
        )
    heads = network.module.model.roi_heads if network.detector else None
    if isinstance(heads, CascadeROIHeads) or getattr(heads, "keypoint_on", False):
        return (
            "Detectron2's cascade and keypoint heads take the number of boxes on an image out of "
            "the graph; use TorchScript (.ts), or export only the backbone"
        )
    return None


def _refuse_onnx(network: Network) -> str | None:
    if network.detector:
        return (
            "Detectron2's selection of boxes has no ONNX form that was compared with it; export "
            "only the backbone, or the detector as TorchScript (.ts) or torch.export (.pt2)"
        )
    needed = ("onnx", "onnxscript", "onnxruntime")
    missing = [name for name in needed if importlib.util.find_spec(name) is None]
    if missing:
        return f"it needs other packages: pip install {' '.join(missing)}"
    return _refuse_torch_export(network)


FORMATS: dict[str, Format] = {
    suffix: Format(name, suffix, refuse, write, read)
    for name, suffix, refuse, write, read in (
        ("TorchScript", ".ts", lambda network: None, _write_torchscript, _read_torchscript),
        ("torch.export", ".pt2", _refuse_torch_export, _write_torch_export, _read_torch_export),
        ("ONNX", ".onnx", _refuse_onnx, _write_onnx, _read_onnx),
    )
}
