"""The size of each room in tokens of Python, beside what CONTRIBUTING.md allows it.

    .venv/bin/python .ci/size.py

Size is the number of mechanisms, and tokens measure it better than lines, which can be folded, or
characters, which can be saved in names. Comments and docstrings are free. A string is one token;
one of several lines, or of more than 200 characters, is a table or a text and counts by its words.
C++ and CUDA count by lines that hold more than a comment.
"""

import ast
import io
import re
import subprocess
import tokenize
from collections import Counter
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parents[1]
LONG_STRING = 200  # characters
_FREE = {
    tokenize.COMMENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
    tokenize.INDENT,
    tokenize.NEWLINE,
    tokenize.NL,
}
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
# Since Python 3.12 an f-string is a start, what is within, and an end
_STARTS = {getattr(tokenize, f"{kind}STRING_START", None) for kind in "FT"} - {None}
_ENDS = {getattr(tokenize, f"{kind}STRING_END", None) for kind in "FT"} - {None}


def python_tokens(text: str) -> int:
    """Tokens of a file of Python, without its comments and docstrings."""
    documentation = {
        node.body[0].lineno
        for node in ast.walk(ast.parse(text))
        if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None
    }
    count, strings_open = 0, 0
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in _FREE:
            continue
        if token.type == tokenize.STRING:
            starts_line = not token.line[: token.start[1]].strip()
            if starts_line and token.start[0] in documentation:
                continue
            is_long = "\n" in token.string or len(token.string) > LONG_STRING
            count += 0 if strings_open else len(token.string.split()) if is_long else 1
            continue
        strings_open += token.type in _STARTS
        # The start of an f-string counts for the whole of it
        count += not strings_open or (token.type in _STARTS and strings_open == 1)
        strings_open -= token.type in _ENDS
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
        if path.suffix == ".py" and (ROOT / path).is_file():
            found[room_of(path)] += python_tokens((ROOT / path).read_text(encoding="utf-8"))
        elif path.suffix in (".cpp", ".cu", ".h") and (ROOT / path).is_file():
            room = f"{room_of(path)}, C++ and CUDA"
            found[room] += native_lines((ROOT / path).read_text(encoding="utf-8"))
    return found


def main() -> None:
    """Print the table."""
    found = sizes()
    for room, size in sorted(found.items()):
        print(f"{room:34}{size:8}")
    package = sum(
        size for room, size in found.items() if room.startswith("lambda_det") and "," not in room
    )
    print(f"{'the package':34}{package:8}")


if __name__ == "__main__":
    main()
