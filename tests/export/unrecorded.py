"""Exports whose graph is not recorded, which takes half a minute: the network itself computes."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lambda_det.export import FORMATS
from lambda_det.export.detections import exportable_detections
from lambda_det.export.formats import Runner
from lambda_det.export.networks import Network

NOTHING = """
<ir_version: 9, opset_import: ["" : 18]>
nothing (float[1] images) => (float[1] same) { same = Identity(images) }
"""


def record_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a file hold no graph, and compute with the network that it was last written for.

    Everything else of an export stays: what the command takes, the comparison, metadata, and the
    proof by AP. tests/export/test_detector.py and test_backbone.py record graphs.
    """
    networks: list[Network] = []

    def write(network: Network, example: tuple[Tensor, ...], path: Path) -> None:
        networks.append(network)
        path.write_bytes(b"")
        if path.suffix == ".onnx":
            import onnx

            onnx.save(onnx.parser.parse_model(NOTHING), path)

    def read(path: Path, outputs: Sequence[str]) -> Runner:
        network = networks[-1]

        def run(*inputs: Tensor) -> dict[str, Tensor]:
            with torch.no_grad(), exportable_detections():
                return network.module(*inputs)

        return run

    monkeypatch.setattr("lambda_det.export.exported.read_onnx", read)
    for suffix, form in FORMATS.items():
        monkeypatch.setitem(FORMATS, suffix, replace(form, write=write, read=read, recorded=False))
