"""Kernels of the CPU in any model of Detectron2: convolutions, norms, ROIAlign, box heads."""

from lambda_det.cpu.accelerate import accelerate

__all__ = ["accelerate"]
