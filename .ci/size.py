"""The size of each room in tokens of Python, which CONTRIBUTING.md limits; `make lint` runs it.

    .venv/bin/python .ci/size.py          # fails where a room is above its limit
    .venv/bin/python .ci/size.py --set    # limits of what is reached and two per cent

Size is the number of mechanisms, and tokens measure it better than lines, which can be folded, or
characters, which can be saved in names. Comments and docstrings are free. A string is one token;
one of several lines, or of more than 200 characters, is a table or a text and counts by its words.
C++ and CUDA count by lines that hold more than a comment.
"""

import ast
import io
import re
import subprocess
import sys
import tokenize
from collections import Counter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
LONG_STRING = 200  # characters
_FREE = {"COMMENT", "DEDENT", "ENCODING", "ENDMARKER", "INDENT", "NEWLINE", "NL"}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def python_tokens(text: str) -> int:
    """Tokens of a file of Python, without its comments and docstrings."""
    documentation: set[int] = set()  # its lines
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            documentation.update(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    count = strings_open = 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        kind = tokenize.tok_name[token.type]
        if kind in _FREE or token.start[0] in documentation:
            continue
        if kind == "STRING" and ("\n" in token.string or len(token.string) > LONG_STRING):
            count += len(token.string.split())
        else:
            # Since Python 3.12 an f-string is a start, which counts, what is within, and an end
            count += not strings_open and not kind.endswith("STRING_END")
        strings_open += kind.endswith("STRING_START") - kind.endswith("STRING_END")
    return count


def native_lines(text: str) -> int:
    """Lines of C++ or CUDA that hold more than a comment."""
    text = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL)
    return sum(bool(line.split("//")[0].strip()) for line in text.splitlines())


def room_of(path: PurePosixPath) -> str:
    """The room that a file belongs to."""
    if path.parts[0] == "projects":
        return "projects, their tests" if "tests" in path.parts else "projects"
    if path.parts[0] != "lambda_det":
        return path.parts[0] if path.parts[0] in ("tests", "configs") else "the rest"
    if path.parts[:3] == ("lambda_det", "detection", "data"):
        return "lambda_det/detection/data"
    return f"lambda_det/{path.parts[1]}" if len(path.parts) > 2 else "lambda_det/*.py"


def sizes() -> Counter[str]:
    """The size of each room of this tree, of the files that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    found: Counter[str] = Counter()
    for name in filter(None, listed.split("\0")):
        path = PurePosixPath(name)
        if path.suffix not in (".py", ".cpp", ".cu", ".h") or not (ROOT / path).is_file():
            continue
        text, room = (ROOT / path).read_text("utf-8"), room_of(path)
        if path.suffix == ".py":
            found[room] += python_tokens(text)
        else:
            found[f"{room}, C++ and CUDA"] += native_lines(text)
    return found


_ROW = re.compile(r"^\| `?(.+?)`? \| ([\d,]+) \|$", re.MULTILINE)
_TABLE = re.compile(r"(?<=\| room \| tokens, at most \|\n\|---\|---:\|\n)(\|.*\n)+")


def main(argv: list[str]) -> int:
    """Print the sizes beside their limits; 1 where one is above, or has none."""
    found = sizes()
    page = PAGE.read_text("utf-8")
    if argv == ["--set"]:
        rows = "".join(
            f"| {room} | {size * 102 // 100:,} |\n" for room, size in sorted(found.items())
        )
        page = _TABLE.sub(rows, page)
        PAGE.write_text(page, "utf-8")
    allowed = {room: int(size.replace(",", "")) for room, size in _ROW.findall(page)}
    above = []
    for room, size in sorted(found.items()):
        print(f"{room:34}{size:8,}{allowed.get(room, 0):9,}")
        if size > allowed.get(room, 0):
            above.append(room)
    package = (room for room in found if room.startswith("lambda_det") and "C++" not in room)
    print(f"{'the package':34}{sum(found[room] for room in package):8,}")
    for room in above:
        print(f"error: {room} is above its limit in CONTRIBUTING.md, which says when one goes up")
    return int(bool(above))


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
