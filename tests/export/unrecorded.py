"""Exports whose graph is not recorded, which takes half a minute: the network itself computes."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from lambda_det.export import onnx_file
from lambda_det.export.detections import exportable_detections
from lambda_det.export.networks import Network

NOTHING = """
<ir_version: 9, opset_import: ["" : 18]>
nothing (float[1] images) => (float[1] same) { same = Identity(images) }
"""


def record_nothing(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[dict], dict] = lambda outputs: outputs
) -> None:
    """Let a file hold no graph, and compute with the network that it was last written for.

    Everything else of an export stays: what the command takes, the comparison, metadata, and the
    proof by AP. tests/export/test_detector.py and test_backbone.py record graphs.
    """
    networks: list[Network] = []
    original = onnx_file.read

    def write(network: Network, example: tuple[Tensor, ...], path: Path) -> list[str]:
        import onnx

        networks.append(network)
        onnx.save(onnx.parser.parse_model(NOTHING), path)
        with torch.no_grad(), exportable_detections():
            return list(network.module(*example))

    def read(path: Path) -> tuple[dict, Callable[..., dict[str, Tensor]]]:
        network = networks[-1]

        def run(*inputs: Tensor) -> dict[str, Tensor]:
            with torch.no_grad(), exportable_detections():
                return change(network.module(*inputs))

        return original(path)[0], run

    monkeypatch.setattr(onnx_file, "write", write)
    monkeypatch.setattr(onnx_file, "read", read)
    monkeypatch.setattr(onnx_file, "check_possible", lambda: None)
