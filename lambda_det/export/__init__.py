"""Trained networks as files that other runtimes load, in the formats of ``FORMATS``."""

from lambda_det.export.formats import FORMATS, Format, format_of
from lambda_det.export.networks import Network, backbone_network, detector_network
from lambda_det.export.portable import portable_copy
from lambda_det.export.session import ExportReport, export_network

__all__ = [
    "FORMATS",
    "ExportReport",
    "Format",
    "Network",
    "backbone_network",
    "detector_network",
    "export_network",
    "format_of",
    "portable_copy",
]
