"""Backbone files: made from a checkpoint, written, read, and verified in a detector."""

from lambda_det.checkpoint.backbone_file import check_target, read_backbone, save_backbone
from lambda_det.checkpoint.export import export_backbone
from lambda_det.checkpoint.extract import extract_backbone, says_network
from lambda_det.checkpoint.network import Network, network_of_config
from lambda_det.checkpoint.run import config_of_run, find_checkpoint
from lambda_det.checkpoint.target import load_target
from lambda_det.checkpoint.verify import Report, verify_backbone

__all__ = [
    "Network",
    "Report",
    "check_target",
    "config_of_run",
    "export_backbone",
    "extract_backbone",
    "find_checkpoint",
    "load_target",
    "network_of_config",
    "read_backbone",
    "save_backbone",
    "says_network",
    "verify_backbone",
]
