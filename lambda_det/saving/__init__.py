"""Checkpoints of a run: written beside training, found whole again, read without running them."""

from lambda_det.saving.checkpoint_files import last_checkpoint, newest_good
from lambda_det.saving.checkpointer import SafeCheckpointer
from lambda_det.saving.disk_errors import disk_errors_in_words

__all__ = ["SafeCheckpointer", "disk_errors_in_words", "last_checkpoint", "newest_good"]
