"""Write into docs/detect.py how detections of tiles are joined: it needs no package of ours.

    .venv/bin/python .ci/detect.py

It is the text of lambda_det/detection/merging.py from the first line below its imports on.
"""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAM = ROOT / "docs" / "detect.py"
SOURCE = ROOT / "lambda_det" / "detection" / "merging.py"
BEGIN, END = (
    "# ---- lambda_det/detection/merging.py, which .ci/detect.py writes here\n",
    "# ---- the program\n",
)


def program() -> str:
    """The text of docs/detect.py."""
    before, _, rest = PROGRAM.read_text("utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    _, _, merging = SOURCE.read_text("utf-8").partition("import numpy as np\n\n")
    return f"{before}{BEGIN}{merging}\n\n{END}{after}"


if __name__ == "__main__":
    PROGRAM.write_text(program(), "utf-8")
