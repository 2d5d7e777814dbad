"""What is installed here, what of it works, and the known faults with their mends.

Nothing in this package may import PyTorch, Detectron2 or another part of lambda_det as it is itself
imported: it has to speak where those are missing or broken.
"""

from lambda_det.doctor.checks import CHECKS, examine
from lambda_det.doctor.finding import Finding
from lambda_det.doctor.inventory import devices, operators, versions

__all__ = ["CHECKS", "Finding", "devices", "examine", "operators", "versions"]
