#!/usr/bin/env python
"""Install Detectron2, as ``lambda-det doctor --install`` does, before the package is installed."""

import runpy
from pathlib import Path

if __name__ == "__main__":
    program = Path(__file__).resolve().parents[1] / "lambda_det" / "install_detectron2.py"
    runpy.run_path(str(program), run_name="__main__")
