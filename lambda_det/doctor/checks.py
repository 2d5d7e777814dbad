"""The known faults, each found by a small function of its own; ``CHECKS`` is the table of them.

A check returns what it found, and nothing where its subject is missing for a reason that another
check tells.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lambda_det.doctor import detectron2_checks, environment_checks, package_checks
from lambda_det.doctor.finding import Finding, first_line

CHECKS: dict[str, Callable[[], Iterable[Finding]]] = {
    "Python": package_checks.python,
    "torch": package_checks.torch,
    "torch and numpy": package_checks.torch_and_numpy,
    "torchvision": package_checks.torchvision,
    "shapely": package_checks.shapely,
    "pycocotools": package_checks.pycocotools,
    "OpenCV": package_checks.opencv,
    "requirements": package_checks.requirements,
    "Detectron2": detectron2_checks.detectron2,
    "Detectron2's operators": detectron2_checks.compiled_operators,
    "pkg_resources": detectron2_checks.pkg_resources,
    "names that numpy and Pillow have given up": detectron2_checks.outdated_names,
    "skipped images": detectron2_checks.skipped_images,
    "lambda_det": detectron2_checks.lambda_det,
    "CUDA": environment_checks.cuda,
    "torchrun": environment_checks.torchrun,
    "shared memory": environment_checks.shared_memory,
    "open files": environment_checks.open_files,
    "compiler": environment_checks.compiler,
}


def examine(checks: dict[str, Callable[[], Iterable[Finding]]] = CHECKS) -> list[Finding]:
    """Make all checks; one that fails itself is a finding, too, and doesn't stop the others."""
    found = []
    for name, check in checks.items():
        try:
            found += check()
        except Exception as error:  # it examines broken installations
            found.append(
                Finding(
                    f"The check of {name} failed itself: {first_line(error)}.",
                    "Mend what else is found here, and look again.",
                )
            )
    return found
