"""The command ``lambda-det``, and the files of ``tools/`` that answer as they did before it."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from lambda_det import cli
from lambda_det.config import CONFIGS, find_config_file
from lambda_det.errors import ConfigError, DataError, refused
from lambda_det.files import writing_to
from lambda_det.training import command_line
from tests import forked

ROOT = Path(__file__).parents[1]
TOOLS = sorted(p for folder in ("tools", "datasets") for p in (ROOT / folder).glob("*.py"))
# Of each file, whether it prints its usage; in a process where the import of ``tools`` finds
# another's package, as beside a Detectron2 that installs one
HELP = """
import os, runpy, sys
sys.path.insert(0, os.getcwd())
for path in sys.argv[1:]:
    sys.argv = [path, "--help"]
    try:
        runpy.run_path(path, run_name="__main__")
    except SystemExit as end:
        assert not end.code, path
    else:
        raise AssertionError(f"{path} did not end")
assert "tools" not in sys.modules
"""


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_a_help_with_its_name(name, capsys):
    with pytest.raises(SystemExit) as end:
        cli.main([name, "--help"])
    assert not end.value.code
    printed = capsys.readouterr().out
    assert printed.startswith(f"usage: lambda-det {name} [-h]")
    assert f"  {name} " in cli.usage()


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("tarin", "train"),
        ("train --data my --epohcs 3", "--epochs"),
        ("train --data my --sise=640", "--size"),
        ("check my --singel-class", "--single-class"),
        ("convert in out --formta yolo", "--format"),
        ("predict run --input a --output b --scorethreshold 0.3", "--score-threshold"),
        ("evaluate run --parts test", "--part"),
        ("report run --scorethreshold 0.3", "--score-threshold"),
        ("export run out.onnx --bacth 3", "--batch"),
        ("backbone in out --modle x", "--model"),
        ("push run me/x --fodler y", "--folder"),
        ("doctor --inastall", "--install"),
        ("train --data my --lr 0.01", "SOLVER.BASE_LR 0.01"),
        ("train --data my --epochs three", "--epochs is 'three'; give a number"),
        ("train --config", "lambda-det train --help shows the flags"),
    ],
)
def test_a_wrong_word_gets_one_that_is_right(capsys, words, hint):
    with contextlib.suppress(SystemExit):
        assert cli.main(words.split()) == 2
    assert (hint if " " in hint else f"did you mean {hint}") in capsys.readouterr().err


@pytest.fixture
def started(monkeypatch):
    """What would be trained: the class of the task, the file and the keys."""
    runs = []
    monkeypatch.setattr(
        "lambda_det.distributed.launch.launch",
        lambda work, args, **device: runs.append(
            (type(work.keywords["task"]).__name__, work.keywords["config_file"], args.opts)
        ),
    )
    return runs


@pytest.mark.parametrize(
    ("file", "task", "keys"),
    [
        ("mask_rcnn_lambdaresnet50.yaml", "DetectionTask", "OUTPUT_DIR a b MODEL.DEVICE cpu"),
        ("mask_rcnn_lambdaresnet50.py", "DetectionTask", "train.output_dir='a b' train.device=cpu"),
        (
            "imagenet/lambda_resnet50_160.yaml",
            "ClassificationTask",
            "OUTPUT_DIR a b MODEL.DEVICE cpu",
        ),
    ],
)
def test_train_does_what_the_file_says(file, task, keys, started, tmp_path, monkeypatch):
    """Of a file that lambda_det brings, too, from any folder; flags become keys."""
    monkeypatch.chdir(tmp_path)
    key = "SOLVER.IMS_PER_BATCH" if file.endswith("yaml") else "dataloader.train.total_batch_size"
    pair = [key, "8"] if file.endswith("yaml") else [f"{key}=8"]
    words = ["--resume", "--output", "a b", "--device", "cpu", *pair]
    assert cli.main(["train", "--config", f"configs/{file}", *words]) == 0
    ((found, config, opts),) = started
    assert (found, config) == (task, str(CONFIGS / file))
    assert " ".join(opts) == " ".join([keys, *pair])  # so a key without a value comes last


def test_a_file_that_is_there_comes_before_one_that_lambda_det_brings(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = "mask_rcnn_lambdaresnet50.yaml"
    assert find_config_file(name) == str(CONFIGS / name)
    Path(name).touch()
    assert find_config_file(name) == name
    assert find_config_file("nothing.yaml") == "nothing.yaml" and find_config_file("") == ""


def test_the_words_after_ctrl_c(monkeypatch, capsys):
    def interrupted(args, file):
        raise KeyboardInterrupt

    monkeypatch.setattr(command_line, "run", interrupted)
    assert cli.main(["train", "--config", "mask_rcnn_lambdaresnet50.yaml"]) == 130
    assert "--resume" in capsys.readouterr().err


def test_errors_of_others_have_their_reason_once(tmp_path):
    """A file that the sentence names is not named again, another one is; ours stay as they are."""
    file = tmp_path / "a"
    once = pytest.raises(DataError, match=r"a is gone \(No such file or directory\); look\.$")
    with once, refused(DataError, f"{file} is gone", "look", OSError):
        file.read_text()
    file.write_text("")
    for target in (file / "c", file / "b" / "c"):
        other = pytest.raises(ConfigError, match=r"c cannot be written \(\[Errno.*'\S*a.*'\)\.$")
        with other, writing_to(target):
            raise AssertionError
    with pytest.raises(ConfigError, match=r"^ours$"), refused(DataError, "what", "", Exception):
        raise ConfigError("ours")


@pytest.mark.slow
@pytest.mark.checkout
def test_every_file_starts_beside_a_foreign_package_named_tools(tmp_path):
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/__init__.py").write_text("raise ImportError('the foreign tools')\n")
    result = forked.run(["-c", HELP, *TOOLS], tmp_path / "printed", cwd=tmp_path)
    assert result.returncode == 0, result.stdout[-2000:]
    assert result.stdout.count("usage: ") == len(TOOLS)


# The status of what is printed or raised by an expression, without an import of the package
STATUS = """
import errno, runpy, sys
def fail(error, cause=None): raise error from cause
errors = runpy.run_path("lambda_det/errors.py")
sys.exit(errors["exit_status"](lambda: eval(sys.argv[1])))
"""


def started_with(expression: str, **environment: str) -> subprocess.Popen:
    words = [sys.executable, "-c", STATUS, expression]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(words, cwd=ROOT, env={**os.environ, **environment}, **pipes)


@pytest.mark.posix
@pytest.mark.parametrize(("unbuffered", "end"), [("", "0"), ("1", "1")])
def test_a_pipe_that_is_closed_ends_a_command_without_a_stack_trace(unbuffered, end):
    work = started_with(f"[print(n) for n in range(10**5)] and {end}", PYTHONUNBUFFERED=unbuffered)
    assert work.stdout.readline() == b"0\n"
    work.stdout.close()
    assert work.stderr.read() == b"" and work.wait(60) == 141


@pytest.mark.parametrize(
    "expression, status, words",
    [
        ("fail(BrokenPipeError())", 1, "BrokenPipeError"),  # of a pipe between processes
        ("fail(OSError(errno.ENOSPC, 'full', 'a.pth'))", 2, "error: a.pth: full; look"),
        ("fail(RuntimeError(), OSError(errno.EROFS, 'read only'))", 2, "error: A file: read only"),
        ("fail(OSError(errno.EMFILE, 'Too many open files'))", 2, "ulimit -n"),
        ("fail(OSError(errno.ENOENT, 'missing', 'a.pth'))", 1, "FileNotFoundError"),
    ],
)
def test_errors_of_the_disk_are_one_sentence(expression, status, words):
    work = started_with(expression)
    error = work.communicate(timeout=60)[1].decode()
    assert work.returncode == status and words in error
    assert ("Traceback" in error) == (status == 1)


@pytest.mark.parametrize(("encoding", "printed"), [("ascii", rb"gr\xfcn \u7d05"), ("utf-8", None)])
def test_a_terminal_that_lacks_letters_gets_escapes(encoding, printed):
    work = started_with("print('gr\\xfcn \\u7d05')", PYTHONIOENCODING=encoding)
    output, error = work.communicate(timeout=60)
    assert (work.returncode, error) == (0, b"")
    assert output.strip() == (printed or "gr\xfcn \u7d05".encode())
