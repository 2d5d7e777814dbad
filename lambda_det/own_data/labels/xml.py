"""XML in which each element knows its line."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from xml.etree import ElementTree
from xml.parsers import expat

from lambda_det.files import read_text
from lambda_det.own_data.labels.objects import reading

_LINE = " line"  # no attribute has a space in its name


def read_xml(file: Path) -> ElementTree.Element:
    """The root of a file.

    Raises:
        DataError: it cannot be read.
    """
    builder, parser = ElementTree.TreeBuilder(), expat.ParserCreate()
    parser.buffer_text = True
    parser.StartElementHandler = lambda tag, values: builder.start(
        tag, {**values, _LINE: str(parser.CurrentLineNumber)}
    )
    parser.EndElementHandler, parser.CharacterDataHandler = builder.end, builder.data
    with reading(file):
        try:
            parser.Parse(_in_utf_8(file.read_bytes()), True)
        except expat.ExpatError:
            read_text(file)  # the file names another encoding, which is the cause then
            raise
        return builder.close()


def _in_utf_8(content: bytes) -> bytes:
    """The content in UTF-8, without a declaration, as expat can parse it."""
    # Expat has few encodings, and wants a declaration at the beginning. Blank lines stay, because
    # messages count lines
    if declared := _DECLARED.match(content):
        with contextlib.suppress(LookupError, UnicodeDecodeError):
            content = content.decode(declared[1].decode()).encode()
    return _DECLARATION.sub(rb"\1", content)


_DECLARATION = re.compile(rb"\A(\s*)<\?xml[^>]*\?>")
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
    events = ElementTree.iterparse(io.BytesIO(_in_utf_8(content)), ("start",))
    with contextlib.suppress(ElementTree.ParseError, LookupError, ValueError):
        for _, root in events:
            return root.tag.rpartition("}")[2]  # without a namespace
    return None
