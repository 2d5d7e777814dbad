"""Kernels of the CPU in any model of Detectron2: 3x3 convolutions, ROIAlign, box heads."""
