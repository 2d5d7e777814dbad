"""Trained networks as ONNX files, which other runtimes load, and as backbone files."""

from lambda_det.export.networks import Network, backbone_network, detector_network
from lambda_det.export.portable import portable_copy
from lambda_det.export.session import ExportReport, export_network

__all__ = [
    "ExportReport",
    "Network",
    "backbone_network",
    "detector_network",
    "export_network",
    "portable_copy",
]
