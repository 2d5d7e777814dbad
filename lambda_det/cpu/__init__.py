"""Kernels of the CPU in any model of Detectron2: 3x3 convolutions, ROIAlign, box heads."""

from lambda_det.cpu.accelerate import accelerate

__all__ = ["accelerate"]
