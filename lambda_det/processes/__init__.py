"""The processes of a run: how they start, meet, are asked to stop, and end together."""

from lambda_det.processes.launch import check_device, launch, on_main_process
from lambda_det.processes.preemption import at_once, listening, received

__all__ = ["at_once", "check_device", "launch", "listening", "on_main_process", "received"]
