"""Backbone files: made from a checkpoint, written, read, and verified in a detector."""

from lambda_det.checkpoint.backbone_file import extract_backbone, read_backbone, save_backbone
from lambda_det.checkpoint.verify import Report, verify_backbone

__all__ = ["Report", "extract_backbone", "read_backbone", "save_backbone", "verify_backbone"]
