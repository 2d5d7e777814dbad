"""Trained networks as ONNX files, which other runtimes load, and as backbone files."""

from lambda_det.first_use import names_of

MOST = 0.1  # by which the AP of a run and of its file may differ

__getattr__ = names_of(
    __name__,
    {
        "Network": "export.networks",
        "backbone_network": "export.networks",
        "detector_network": "export.networks",
        "portable_copy": "export.portable",
        "ExportReport": "export.session",
        "export_network": "export.session",
    },
)
