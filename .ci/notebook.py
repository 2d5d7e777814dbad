"""Run docs/own_data.ipynb on the shapes of docs/own_data.md, and store what its cells show.

    pip install nbclient ipykernel
    python .ci/notebook.py

Of images that a cell shows in two formats the JPEG is stored, which is an eighth as large.
"""

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "own_data.ipynb"
SHAPES = (  # as in docs/own_data.md
    {"root": "my", "num_train": 200, "num_val": 40},
    {"root": "new", "num_train": 1, "num_val": 8, "seed": 1},
)


def main() -> None:
    sys.path.insert(0, str(ROOT / "datasets"))
    from make_shapes import make_shapes

    os.environ["HF_HUB_OFFLINE"] = "1"  # what is stored does not depend on a connection
    os.environ["PYTHONWARNINGS"] = "ignore:IProgress not found"  # without ipywidgets
    notebook = nbformat.read(PAGE, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        for arguments in SHAPES:
            make_shapes(**arguments)
        NotebookClient(
            notebook,
            timeout=3600,
            coalesce_streams=True,  # of a bar its last state
            record_timing=False,
            resources={"metadata": {"path": folder}},
        ).execute()
        os.chdir(ROOT)
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            if "image/jpeg" in output.get("data", {}):
                output["data"].pop("image/png", None)
    nbformat.write(notebook, PAGE)


if __name__ == "__main__":
    main()
