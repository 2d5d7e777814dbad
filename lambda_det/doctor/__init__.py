"""``python -m lambda_det.doctor``: what is installed, what of it works, known faults and mends.

Nothing in this package may import PyTorch, Detectron2 or another part of lambda_det at its top: it
has to work where those are missing or broken.
"""
