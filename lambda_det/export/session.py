"""An export from beginning to end: it is written, read again and compared, and only then gets its
name.

A backbone is compared on patterns of several sizes. What a detector finds depends on its choice of
boxes, so it is compared as it is used: on photographs, of its run or of the user (proof.py). Where
there are none it is refused.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from lambda_det.detection.data.records import read_image
from lambda_det.errors import ConfigError, first_line, stage
from lambda_det.export import onnx_file
from lambda_det.export.exported import ExportedDetector
from lambda_det.export.networks import Network
from lambda_det.export.output import check_output, sidecar
from lambda_det.export.proof import Proof, prove, prove_on
from lambda_det.files import replace_text, writing_to

TOLERANCE = 1e-4  # float32 sums in another order, and kernels rounded to float32
_LEAST = 1e-30  # what a map of zeros is divided by; trained maps are far above it
# Heights and widths: ordinary, odd, smaller than a scope of 23 in the last maps, and lying
SIZES = ((256, 320), (193, 161), (64, 96), (71, 250))


def differences(outputs: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> dict[str, float]:
    """The greatest difference of each expected output, as a share of its greatest absolute value.

    Infinite where the output is missing, has another shape, or either is not finite.
    """
    return {name: _difference(outputs.get(name), tensor) for name, tensor in expected.items()}


def passes(errors: Mapping[str, float]) -> bool:
    """Whether something was compared, and errors are only of rounding."""
    return bool(errors) and max(errors.values()) <= TOLERANCE


def _difference(output: Tensor | None, expected: Tensor) -> float:
    if output is None or output.shape != expected.shape:
        return math.inf
    output, expected = output.double().cpu(), expected.double().cpu()
    error = float((output - expected).abs().max() / expected.abs().max().clamp(min=_LEAST))
    return error if math.isfinite(error) else math.inf


@dataclass(frozen=True)
class ExportReport:
    """The result of an export.

    Attributes:
        path: the file, which exists only if it passed.
        errors: of a backbone, by the size of the input the error of each output.
        proof: of a detector.
    """

    path: Path
    errors: dict[str, dict[str, float]] = field(default_factory=dict)
    proof: Proof | None = None

    @property
    def passed(self) -> bool:
        if self.proof:
            return self.proof.passed
        return bool(self.errors) and all(map(passes, self.errors.values()))

    def __str__(self) -> str:
        lines = [str(self.proof)] if self.proof else []
        for size, by_name in self.errors.items():
            texts = [f"{name} {error:.1e}" for name, error in by_name.items()]
            lines.append(f"  {size}, greatest error over greatest value: {', '.join(texts)}")
        ending = f"verified: {self.path}"
        if self.proof and not self.proof.compared:
            ending = f"written: {self.path}"
        elif not self.passed:
            ending = f"FAILED: {self.path} does not compute what the model does, and was removed"
        return "\n".join([*lines, ending])


def export_network(
    network: Network,
    output: str | Path,
    *,
    images: Sequence[str] = (),
    overwrite: bool = False,
) -> ExportReport:
    """Export a network as ONNX, and compare the file, read afresh, with the original.

    ``output`` is written only if they agree; beside it comes ``output.json`` with what a user of
    the file has to know. What is done is printed, a line at least every ten seconds.

    Args:
        network: what to export.
        output: ends in .onnx.
        images: files of photographs to compare a detector on, beside those of its run.
        overwrite: replace files that are there.

    Raises:
        ConfigError: the file is there or cannot be written, the network cannot be exported, or
            there is nothing to compare it on.
        DataError: an image cannot be read.
    """
    # The screen of now: what pycocotools prints is kept from it
    say = partial(print, flush=True, file=sys.stdout)
    output = Path(output)
    check_output(output, overwrite)
    onnx_file.check_possible()
    _check_comparable(network, images, say)
    temporary = output.with_name(f"{output.stem}.unverified.onnx")
    with writing_to(output), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the comparison says what they fear
        try:
            with stage("recording the graph, which takes minutes on a slow machine", say):
                outputs = _write(network, temporary)
            about = file_facts(network, outputs)
            onnx_file.finish(temporary, about)
            with stage("comparing the file with the model", say) as comparing:
                if not network.detector:
                    report = ExportReport(output, _compare(network, temporary))
                else:
                    file, proof = ExportedDetector(temporary), Proof()
                    if network.validation:
                        proof = prove(network.validation, network.original, file, comparing)
                    prove_on(images, network.original, file, proof)
                    report = ExportReport(output, proof=proof)
            if report.proof and not report.proof.compared and (network.validation or images):
                raise _uncompared("Nothing was detected on any image")
            if report.passed:
                os.replace(temporary, output)
                replace_text(sidecar(output), json.dumps(about, indent=2) + "\n")
        finally:
            temporary.unlink(missing_ok=True)
    return report


def _write(network: Network, path: Path) -> list[str]:
    """Write the graph of a network, and return the names of its outputs."""
    try:
        return onnx_file.write(network, example(network), path)
    except RuntimeError as error:  # and all that the exporters derive from it
        raise ConfigError(
            f"ONNX cannot hold this network ({first_line(error)}); export only the backbone."
        ) from error


def _check_comparable(
    network: Network, images: Sequence[str], say: Callable[[str], object]
) -> None:
    """Refuse what nothing would compare, and photographs that cannot be read."""
    if not network.detector:
        if images:
            raise ConfigError("A backbone is compared on patterns; leave images out.")
        return
    for name in images:
        read_image({"file_name": name})
    if images and network.why_none:
        say(f"AP is not compared: {network.why_none}")
    elif network.why_none:
        raise _uncompared(network.why_none.rstrip("."))


def _uncompared(why: str) -> ConfigError:
    return ConfigError(
        f"{why}, so nothing shows that the file would find what the detector finds: name "
        "photographs of its objects by --images, or validation images by DATASETS.TEST_JSON and "
        "DATASETS.TEST_IMAGES; --proof 0 without --images writes a file that nobody compared."
    )


def example(network: Network) -> tuple[Tensor, ...]:
    """The input that the graph is recorded on: two images where their number is free."""
    # two or more tiles in the last map, and different sizes wherever they may differ
    images = _patterns(network, (288, 352), network.batch or 2, seed=0)
    if not network.detector:
        return (images,)
    images = (images * 58 + 127).clamp(0, 255).byte().permute(0, 2, 3, 1).contiguous()
    # From the second one on, images fill a part of the canvas
    sizes = torch.tensor([images.shape[1:3]]) * torch.linspace(1, 0.6, len(images))[:, None]
    return images, sizes.to(images.device, torch.int32)


def _patterns(network: Network, size: Sequence[int], count: int, seed: int) -> Tensor:
    """Images [count, 3, H, W], normalised, of blobs as in photographs, of a size that fits."""
    sides = network.fixed or [side + -side % network.stride for side in size]
    numbers = torch.rand(count, 3, 12, 12, generator=torch.Generator().manual_seed(seed)) * 4 - 2
    images = F.interpolate(numbers, sides, mode="bilinear", align_corners=False)
    return images.to(next(network.module.parameters()).device)


@torch.no_grad()
def _compare(network: Network, path: Path) -> dict[str, dict[str, float]]:
    """The errors of a backbone's file, by the size of the input."""
    (_, run), found = onnx_file.read(path), {}
    for seed, size in enumerate(SIZES, 1):
        x = _patterns(network, size, seed % 2 + 1, seed)
        try:
            errors = differences(run(x), network.original(x))
        except Exception as error:  # ONNX Runtime has its own
            errors = {first_line(error): math.inf}
        found["x".join(map(str, x.shape))] = errors
    return found


_DETECTOR = (
    "images [B, H, W, 3], uint8, RGB, each resized and in the upper left corner, and sizes [B, 2], "
    "int32, their heights and widths"
)
_BACKBONE = (
    "images [B, 3, H, W], float32, in the order `input_format`, (pixels - pixel_mean) / pixel_std"
)


def file_facts(network: Network, outputs: Sequence[str]) -> dict:
    """What a user of the file has to know, for its metadata and the JSON file beside it."""
    images = _DETECTOR if network.detector else _BACKBONE
    return {
        "format": f"ONNX, opset {onnx_file.OPSET}",
        "torch": torch.__version__,
        "input": f"{images}; B is `batch`, H and W are `fixed`, where 0 and null stand for any; "
        "they are multiples of `stride`",
        "batch": network.batch,
        "fixed": network.fixed,
        "stride": network.stride,
        "outputs": list(outputs),
        **network.about,
    }
