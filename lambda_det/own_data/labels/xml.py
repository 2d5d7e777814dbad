"""XML in which each element knows its line."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from xml.etree import ElementTree
from xml.parsers import expat

from lambda_det.files import read_text
from lambda_det.own_data.labels.objects import reading

__all__ = ["line_of", "read_xml", "root_name", "stated_size"]

_LINE = " line"  # no attribute has a space in its name


def read_xml(file: Path) -> ElementTree.Element:
    """The root of a file.

    Raises:
        DataError: it cannot be read.
    """
    with reading(file):
        content, encoding = _in_known_encoding(file.read_bytes())
    builder, parser = ElementTree.TreeBuilder(), expat.ParserCreate(encoding)
    parser.buffer_text = True
    parser.StartElementHandler = lambda tag, values: builder.start(
        tag, {**values, _LINE: str(parser.CurrentLineNumber)}
    )
    parser.EndElementHandler, parser.CharacterDataHandler = builder.end, builder.data
    with reading(file):
        try:
            parser.Parse(content, True)
        except expat.ExpatError:
            read_text(file)  # the file names another encoding, which is the cause then
            raise
        return builder.close()


def _in_known_encoding(content: bytes) -> tuple[bytes, str | None]:
    """The content in a form that expat can parse, and its encoding where the content names another.

    Expat itself has few encodings, and Unicode's are its only ones of more than one byte.
    """
    encoding = None
    if declared := _DECLARED.match(content):
        with contextlib.suppress(LookupError, UnicodeDecodeError):
            content, encoding = content.decode(declared[1].decode()).encode(), "utf-8"
    # blank lines stay because messages count lines; a declaration must be at the beginning of a
    # file
    return _BEHIND_BLANKS.sub(rb"\1", content), encoding


_BEHIND_BLANKS = re.compile(rb"\A(\s+)<\?xml[^>]*\?>")
_DECLARED = re.compile(rb"""\s*<\?xml[^>]*?encoding\s*=\s*["']([\w.-]+)["']""")


def line_of(node: ElementTree.Element) -> str:
    """The line in which an element begins."""
    return node.get(_LINE, "")


def stated_size(width: str | None, height: str | None) -> tuple[int, int] | None:
    """Width and height of two texts; None where they state no size, as 0 and 0 do."""
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        size = (int(float(width)), int(float(height)))
        return size if min(size) > 0 else None
    return None


def root_name(content: bytes) -> str | None:
    """The name of the root element, also if the file is broken behind it; None for none."""
    names: list[str] = []
    content, encoding = _in_known_encoding(content)
    parser = expat.ParserCreate(encoding)
    parser.StartElementHandler = lambda name, values: names.append(name)
    with contextlib.suppress(expat.ExpatError, LookupError, ValueError):
        for start in range(0, len(content), _PIECE):
            parser.Parse(content[start : start + _PIECE])
            if names:
                break
        else:  # Expat from 2.6 on puts a token off that is longer than a piece
            parser.Parse(b"", True)
    return names[0] if names else None


_PIECE = 2**16  # bytes that are parsed at once
