"""Pages with examples, executed: their files, and their commands in their order."""

import json
import re
import shlex
from pathlib import Path

import pytest

from tests import forked

pytestmark = pytest.mark.slow  # trains

ROOT = Path(__file__).resolve().parents[1]
_BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# The pages have networks and steps enough to learn something; here it is enough that they run.
_SHORTER = {
    "use_in_your_project": {
        "lambda_resnet26": "resnet14_slim_lambda_c5",
        "make_shapes.py\n": "make_shapes.py --root datasets --num-train 12 --num-val 4\n",
        '["res2", "res3", "res4", "res5"], OUT_CHANNELS: 64': '["res4", "res5"], OUT_CHANNELS: 16',
        "SIZES: [[16], [32], [64], [96], [128]]": "SIZES: [[16], [32], [64]]",
        '["p2", "p3", "p4", "p5", "p6"], ': '["p4", "p5", "p6"], POST_NMS_TOPK_TEST: 20, ',
        '["p2", "p3", "p4", "p5"], ': '["p4", "p5"], ',
        "FC_DIM: 256": "FC_DIM: 16",
        "NUM_CONV: 2, CONV_DIM: 64": "NUM_CONV: 1, CONV_DIM: 16",
        "MAX_ITER: 300": "MAX_ITER: 2",
        "MAX_ITER 20": "MAX_ITER 1",
        "train.max_iter=2\n": "train.max_iter=1\n",
        "max_iter=20": "max_iter=2",
        "total_batch_size = 4": "total_batch_size = 2",
        "post_nms_topk = [200, 50]": "post_nms_topk = [20, 5]",
        "image_size = 128": "image_size = 64",
    },
    "own_data": {
        "--num-train 200 --num-val 40": "--num-train 8 --num-val 2",
        "--num-train 1 --num-val 8": "--num-train 1 --num-val 2",
        "--batch 8": "--batch 2",
        "INPUT.MIN_SIZE_TEST 128": "INPUT.MIN_SIZE_TEST 128 SOLVER.MAX_ITER 2 TEST.EVAL_PERIOD 2 "
        "TEST.DETECTIONS_PER_IMAGE 4",
        "--format yolo\n": "--format yolo --score-threshold 0\n",
        'Predictor("output/mine")': 'Predictor("output/mine", score_threshold=0.0)',
    },
    "own_data.ipynb": {
        "batch=8": "batch=2",
        '"INPUT.MIN_SIZE_TEST": 128': '"INPUT.MIN_SIZE_TEST": 128, "SOLVER.MAX_ITER": 2, '
        '"TEST.EVAL_PERIOD": 2, "TEST.DETECTIONS_PER_IMAGE": 4',
        "run.predictor()": "run.predictor(score_threshold=0.0)",
        "overwrite=True": "overwrite=True, proof=1",
    },
}


# Of a detector that finds something, in tests/detection/prediction/test_examples.py
_ELSEWHERE = ("lambda-det export output detector.onnx", "python $LAMBDA_DET/docs/detect.py")

# tests/export/test_detector.py and test_backbone.py record graphs
_WITHOUT_A_GRAPH = """
import pytest
from tests.export.unrecorded import record_nothing

record_nothing(pytest.MonkeyPatch())
"""
_EXPORT = f"""{_WITHOUT_A_GRAPH}
import sys
from lambda_det import cli

sys.exit(cli.main(sys.argv[1:]))
"""


def _blocks(page: str) -> list[tuple[str, str]]:
    """The kind and the text of each block of a page, in short."""
    text = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    for long, short in _SHORTER.get(page, {}).items():
        assert long in text
        text = text.replace(long, short)
    return _BLOCK.findall(text)


def _commands(page: str) -> list[str]:
    return [text.strip() for kind, text in _blocks(page) if kind == "sh"]


def _run(commands: str, folder: Path) -> str:
    """Run the commands of a block, and return what they print."""
    commands = commands.replace("$LAMBDA_DET", str(ROOT)).replace("\\\n", " ")
    printed = ""
    for line in commands.splitlines():
        program, *words = shlex.split(line)
        assert program in ("python", "lambda-det")
        if program == "lambda-det":
            start = ["-c", _EXPORT] if words[0] == "export" else ["-m", "lambda_det"]
            words = [*start, *words]
        printed += _forked(words, folder)
    return printed


def _forked(words: list[str], folder: Path) -> str:
    done = forked.run(words, folder / "printed", cwd=folder, HF_HUB_OFFLINE="1")
    assert done.returncode == 0, f"{words}\n{done.stdout[-6000:]}"
    return done.stdout


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A project's folder with the files of the page on use in other projects."""
    for kind, text in _blocks("use_in_your_project"):
        if kind != "sh":
            name = re.match(r"# (\S+)\n", text)
            assert name, f"a block does not begin with the name of its file: {text[:60]!r}"
            (tmp_path / name[1]).write_text(text, "utf-8")
    return tmp_path


def test_the_commands_do_what_the_page_says(folder: Path):
    """One after the other: each may use what those before it have made."""
    commands = "\n".join(_commands("use_in_your_project")).replace("\\\n", " ").splitlines()
    left_out = [line for line in commands if line.startswith(_ELSEWHERE)]
    assert len(left_out) == len(_ELSEWHERE)
    for line in commands:
        if line not in left_out:
            _run(line, folder)


@pytest.fixture(scope="module")
def own_data(tmp_path_factory) -> Path:
    """The folder in which the commands of the page on own data ran."""
    folder = tmp_path_factory.mktemp("own_data")
    for command in _commands("own_data"):
        _run(command, folder)
    return folder


def test_from_images_to_a_report(own_data: Path):
    page = (own_data / "output/mine/report.html").read_text("utf-8")
    for part in ("What would bring most", "The worst images", "light_mobilenet_v2_openimages.yaml"):
        assert part in page
    assert len(list((own_data / "found").glob("*.png"))) == 2
    assert len(list((own_data / "found" / "labels").glob("*.txt"))) == 2
    (script,) = [text for kind, text in _blocks("own_data") if kind == "python"]
    (own_data / "use.py").write_text(script, "utf-8")
    assert "%" in _run("python use.py", own_data)


# What the kernel of a notebook does: each cell in turn, and the value of its last line is shown
_KERNEL = """
import ast, json

names, shown = {}, []
for source in 2 * SOURCES:  # cells can be run again
    lines, value = ast.parse(source), None
    if isinstance(lines.body[-1], ast.Expr):
        last = ast.Expression(lines.body.pop().value)
        exec(compile(lines, "cell", "exec"), names)
        value = eval(compile(last, "cell", "eval"), names)
        print(value)
    else:
        exec(compile(lines, "cell", "exec"), names)
    images = [getattr(value, f"_repr_{kind}_", lambda: None)() for kind in ("png", "jpeg")]
    image = any(images)
    shown.append("" if value is None else "image" if image else "text")
with open("shown.json", "w") as file:
    json.dump(shown, file)
"""


def _shown(outputs: list[dict]) -> str:
    """What a cell of a notebook shows as its value: an image, text or nothing."""
    values = [output["data"] for output in outputs if output["output_type"] == "execute_result"]
    if not values:
        return ""
    return "image" if {"image/png", "image/jpeg"} & values[0].keys() else "text"


def test_the_notebook(own_data: Path):
    """It runs, and shows what it has stored. The graph of the export is not recorded."""
    cells = _cells_of_code()
    sources = ["".join(cell["source"]) for cell in cells]
    for long, short in _SHORTER["own_data.ipynb"].items():
        assert sum(long in source for source in sources) == 1, long
        sources = [source.replace(long, short) for source in sources]
    script = f"{_WITHOUT_A_GRAPH}\nSOURCES = {sources!r}\n{_KERNEL}"
    (own_data / "notebook.py").write_text(script, "utf-8")
    printed = _run("python notebook.py", own_data)
    assert "No problem was found." in printed
    assert "What was chosen" in printed and "Evaluation: step 2" in printed
    assert "Environment" not in printed and "Average Precision" not in printed
    assert "2/2" in printed and "'box AP50': " in printed
    assert "at the run's own evaluation" in printed
    assert "% at [" in printed and "verified: " in printed
    assert (own_data / "output/notebook/report.html").is_file()
    shown = json.loads((own_data / "shown.json").read_text("utf-8"))
    assert shown == 2 * [_shown(cell["outputs"]) for cell in cells]


def test_the_notebook_was_run_from_its_first_cell_to_its_last():
    cells = _cells_of_code()
    assert [cell["execution_count"] for cell in cells] == [*range(1, len(cells) + 1)]
    outputs = [output for cell in cells for output in cell["outputs"]]
    assert not [output for output in outputs if output["output_type"] == "error"]
    assert len((ROOT / "docs" / "own_data.ipynb").read_bytes()) < 1_000_000
    text = json.dumps([[o.get("text"), o.get("data", {}).get("text/plain")] for o in outputs])
    assert not re.search(r"[\s\"'(](?:/\w|[A-Z]:\\)", text), "a path of the machine that ran it"
    assert "None" not in text


def _cells_of_code() -> list[dict]:
    notebook = json.loads((ROOT / "docs" / "own_data.ipynb").read_text("utf-8"))
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
