"""An export from beginning to end: it is written, read again and compared, and only then gets its
name.
"""

from __future__ import annotations

import json
import os
import time
import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from lambda_det.errors import ConfigError
from lambda_det.export.differences import TOLERANCE, alike, differences
from lambda_det.export.exported import ExportedDetector, sidecar
from lambda_det.export.formats import Format, Runner, format_of
from lambda_det.export.networks import Network
from lambda_det.export.proof import Proof
from lambda_det.files import refuse_existing, replace_text

__all__ = ["SIZES", "Comparison", "ExportReport", "export_network"]

# Heights and widths: ordinary, odd, smaller than a scope of 23 in the last maps, and lying
SIZES = ((256, 320), (193, 161), (64, 96), (71, 250))
ROUNDING = 1e-3  # of pixels from 0 to 255: as small relative to them as such differences


@dataclass(frozen=True)
class Comparison:
    """The outputs for one input, compared with the original's.

    Attributes:
        shape: of the input.
        errors: by output, see :func:`lambda_det.export.differences.differences`.
        detections: on the image; None for a backbone.
        fault: why the file did not run.
        undecided: whether the original itself gives other detections on an input that differs only
            by rounding errors, so the comparison shows nothing.
    """

    shape: tuple[int, ...]
    errors: dict[str, float] = field(default_factory=dict)
    detections: int | None = None
    fault: str | None = None
    undecided: bool = False

    @property
    def passed(self) -> bool:
        return self.undecided or (self.fault is None and alike(self.errors))


@dataclass(frozen=True)
class ExportReport:
    """The result of an export.

    Attributes:
        path: the file, which exists only if all comparisons passed.
        seconds: the time of the export.
        size: of the file in bytes.
        proof: the comparison on validation images, of a detector whose run is known.
    """

    path: Path
    seconds: float
    size: int
    comparisons: list[Comparison]
    proof: Proof | None = None

    @property
    def decided(self) -> list[Comparison]:
        return [comparison for comparison in self.comparisons if not comparison.undecided]

    @property
    def compared(self) -> bool:
        """Whether the file computes what the model does, on the images that were compared."""
        return bool(self.decided) and all(comparison.passed for comparison in self.decided)

    @property
    def passed(self) -> bool:
        return self.compared and (self.proof is None or self.proof.passed)

    def errors(self) -> dict[str, float]:
        """The greatest error by output."""
        errors = [comparison.errors for comparison in self.decided]
        # not max(), which would ignore a NaN in the second place
        return {
            name: float(np.max([by_name[name] for by_name in errors if name in by_name]))
            for name in dict.fromkeys(name for by_name in errors for name in by_name)
        }


def export_network(
    network: Network,
    output: str | Path,
    *,
    sizes: Sequence[tuple[int, int]] | None = None,
    images: Sequence[Tensor] = (),
    overwrite: bool = False,
) -> ExportReport:
    """Export a network, and compare the file, read afresh, with the original.

    ``output`` is written only if all agree; beside it comes ``output.json`` with what a user of the
    file has to know.

    Args:
        network: what to export.
        output: its suffix says the format, see :data:`lambda_det.export.FORMATS`.
        sizes: heights and widths to compare on; None for ``SIZES``.
        images: images [3, H, W] of pixels 0 to 255 to fill these sizes with, else patterns.
        overwrite: replace files that are there.

    Raises:
        ConfigError: the file is there or cannot be written, or the network cannot be exported.
    """
    output, form = Path(output), format_of(output)
    check_output(output, overwrite)
    form.check(network)
    sizes = _sizes(network, sizes)
    temporary = output.with_name(f"{output.stem}.unverified{output.suffix}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the comparison says what they fear
            seconds = _write(form, network, example(network, images), temporary)
            inputs = list(comparison_inputs(network, sizes, images))
            with torch.no_grad():
                outputs = list(network.original(*inputs[0]))
                runner = form.read(temporary, outputs)
                comparisons = [compare(network, runner, x) for x in inputs]
        report = ExportReport(output, seconds, temporary.stat().st_size, comparisons)
        about = file_facts(network, report)
        if report.passed and form.finish:
            form.finish(temporary, about)
        if report.passed and network.prove:
            report = replace(report, proof=network.prove(ExportedDetector(temporary)))
        if report.passed:
            os.replace(temporary, output)
            replace_text(sidecar(output), json.dumps(about, indent=2) + "\n")
    except OSError as error:
        raise ConfigError(f"{output} cannot be written: {error}.") from error
    finally:
        temporary.unlink(missing_ok=True)
    return report


def _write(form: Format, network: Network, inputs: tuple[Tensor, ...], path: Path) -> float:
    """Write a file, and return how many seconds it took.

    Raises:
        ConfigError: the format cannot hold the network.
    """
    start = time.perf_counter()
    try:
        form.write(network, inputs, path)
    except RuntimeError as error:  # and all that the exporters derive from it
        raise ConfigError(
            f"{form.name} cannot hold this network ({_first_line(error)}); use another format "
            "or export only the backbone."
        ) from error
    return time.perf_counter() - start


def _sizes(network: Network, sizes: Sequence[tuple[int, int]] | None) -> Sequence[tuple[int, int]]:
    """Sizes to compare on; an FPN takes only multiples of its largest stride."""
    stride, fixed = network.stride, network.fixed
    if sizes is None:
        sizes = [fixed or (h + -h % stride, w + -w % stride) for h, w in SIZES]
    if fixed and set(sizes) != {fixed}:
        raise ConfigError("With --fixed, --sizes can name only the same size.")
    for height, width in sizes:
        if height % stride or width % stride:
            raise ConfigError(
                f"The network takes sides that are multiples of {stride}, and not {height}x{width}."
            )
    return sizes


def check_output(output: Path, overwrite: bool) -> None:
    """Raise ConfigError where ``output`` or what comes beside it cannot be written."""
    if not output.parent.is_dir():
        raise ConfigError(f"There is no folder {output.parent} for {output.name}; make it first.")
    for path in (output, sidecar(output)):
        refuse_existing(path, overwrite)


def example(network: Network, images: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """The input that the graph is recorded on: two images where their number is free."""
    # two or more tiles in the last map, and different sizes wherever they may differ
    size = network.fixed or (288 + -288 % network.stride, 352 + -352 % network.stride)
    inputs = [as_inputs(network, fill(network, size, x, seed=0), 2) for x in images or [None]]
    if len(inputs) == 1 or not network.detector:
        return inputs[0]
    with torch.no_grad():  # the image with the most detections records the most
        return max(inputs, key=lambda x: int(network.original(*x)["count"].sum()))


def comparison_inputs(
    network: Network, sizes: Iterable[tuple[int, int]], images: Sequence[Tensor]
) -> Iterator[tuple[Tensor, ...]]:
    """One input of each size; a detector also gets a blank image, with nothing to detect."""
    for index, size in enumerate(sizes):
        source = images[index % len(images)] if images else None
        yield as_inputs(network, fill(network, size, source, seed=index + 1), index % 2 + 1)
    if network.detector:
        yield as_inputs(network, torch.zeros(3, *sizes[0], device=network.device), 2)


def as_inputs(network: Network, image: Tensor, count: int) -> tuple[Tensor, ...]:
    """The inputs of a network for an image [3, H, W]; ``count`` images if their number is free."""
    count = network.batch or count
    images = torch.stack([image.roll(i * 9, 2) for i in range(count)])
    if not network.detector:
        return (images,)
    images = images.permute(0, 2, 3, 1).contiguous().round().clamp(0, 255).to(torch.uint8)
    # From the second one on, images fill a part of the canvas
    sizes = torch.tensor([image.shape[1:]]) * torch.linspace(1, 0.6, count)[:, None]
    return images, sizes.to(images.device, torch.int32)


def fill(network: Network, size: tuple[int, int], source: Tensor | None, seed: int) -> Tensor:
    """Make an image [3, H, W] of that size, as the network expects it."""
    if source is None:
        generator = torch.Generator().manual_seed(seed)
        source = torch.rand(3, 12, 12, generator=generator) * 255  # blobs, as photographs have them
    image = torch.nn.functional.interpolate(
        source[None].float(), size, mode="bilinear", align_corners=False
    )[0]
    if not network.detector:
        image = (image - 127) / 58
    return image.to(network.device)


def compare(network: Network, runner: Runner, x: tuple[Tensor, ...]) -> Comparison:
    """Run the file and the original on an input."""
    expected = network.original(*(value.clone() for value in x))
    try:
        errors, fault = differences(runner(*(value.clone() for value in x)), expected), None
    except Exception as error:  # each runtime has its own errors
        errors, fault = {}, _first_line(error)
    count = int(expected["count"].sum()) if network.detector else None
    made = Comparison(tuple(x[0].shape), errors, count, fault)
    is_open = not (made.passed or fault) and network.features
    is_open = is_open and is_undecided(network, x, expected)
    return replace(made, undecided=True) if is_open else made


def is_undecided(network: Network, x: tuple[Tensor, ...], expected: dict[str, Tensor]) -> bool:
    """Whether the detections on an image say nothing about the file.

    If a detector has learned little, or the image is blank, rounding errors decide the order of its
    boxes. A change of the input by a rounding error then changes the detections in at least one of
    eight tries. The features must be equal.
    """
    if not alike(differences(*(function(*x) for function in network.features))):
        return False
    generator = torch.Generator().manual_seed(0)
    for _ in range(8):
        noise = torch.randn(x[0].shape, generator=generator) * ROUNDING
        noisy = (x[0] + noise.to(x[0].device), *x[1:])
        if not alike(differences(network.original(*noisy), expected)):
            return True
    return False


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    last = lines[-1] if lines[0].startswith("The following operation failed") else lines[0]
    return f"{type(error).__name__}: {last}"[:300]


def file_facts(network: Network, report: ExportReport) -> dict:
    """What a user of the file has to know, for the JSON file beside it."""
    if network.detector:
        images = (
            "images [B, H, W, 3], uint8, RGB, each resized and in the upper left corner, and sizes "
            "[B, 2], int32, their heights and widths"
        )
    else:
        images = (
            "images [B, 3, H, W], float32, in the order `input_format`, (pixels - pixel_mean) / "
            "pixel_std"
        )
    return {
        "format": format_of(report.path).name,
        "torch": torch.__version__,
        "input": f"{images}; B is `batch`, H and W are `fixed`, where 0 and null stand for any; "
        "they are multiples of `stride`",
        "batch": network.batch,
        "fixed": network.fixed,
        "stride": network.stride,
        "dtype": "float32",
        "device": str(network.device),
        "outputs": list(report.comparisons[0].errors),
        **network.about,
        "compared": [
            {"input": list(c.shape), "detections": c.detections, "errors": c.errors}
            for c in report.decided
        ],
        "tolerance": TOLERANCE,
    }
