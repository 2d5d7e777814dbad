"""An HTML page that holds its figures and pictures, and needs no script and no other file."""

from __future__ import annotations

import base64
import html
import io
import warnings
from collections.abc import Iterable, Mapping, Sequence
from string import Template
from typing import Any

import cv2
import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

# Colours of figures. Matplotlib draws in black, which a page replaces by the ink of a light or dark
# screen.
INK, ON_ACCENT, ACCENT = "#000000", "#fefefe", "#1f5fae"


def new_axes(width: float, height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots()
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def to_svg(figure: Figure, label: str, *, keeps_size: bool = False) -> str:
    """A figure within a page; with ``keeps_size`` it is moved sideways where the window is
    narrower, and else it becomes smaller there.
    """
    written = io.StringIO()
    for text in figure.findobj(Text):
        text.set_parse_math(False)  # names may have a $
    # as text, because a browser has all letters; Matplotlib's own font may lack some, and warns
    with rc_context({"svg.fonttype": "none"}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph")
        figure.savefig(written, format="svg", transparent=True, metadata={"Date": None})
    picture = written.getvalue()
    picture = picture[picture.index("<svg") :]
    picture = picture.replace(INK, "var(--ink)")
    kind = "figure scroll" if keeps_size else "figure"
    return f'<div class="{kind}" role="img" aria-label="{html.escape(label)}">{picture}</div>'


def to_figure(picture: np.ndarray, caption: str) -> str:
    """A picture [H, W, 3] of uint8, BGR, as a JPEG within a page, with its caption."""
    content = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, 85])[1]
    data = base64.b64encode(content.tobytes()).decode("ascii")
    return (
        f'<figure><img alt="{html.escape(caption)}" src="data:image/jpeg;base64,{data}">'
        f"<figcaption>{html.escape(caption)}</figcaption></figure>"
    )


_PAGE = Template("""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title</title>
<style>
:root { color-scheme: light dark; --ink: #1c2128; --paper: #fff; --line: #d9dde3; --soft: #5b6470;
        --accent: #1f5fae; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e3e7ec; --paper: #15181d; --line: #353b44; --soft: #a3acb8; --accent: #79b0f2; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 24px 20px 60px; color: var(--ink);
       font: 15px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; background: var(--paper); }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 18px; margin: 36px 0 8px; padding-top: 12px; border-top: 1px solid var(--line); }
p { margin: 4px 0 12px; color: var(--soft); max-width: 75ch; overflow-wrap: anywhere; }
.numbers { display: grid; grid-template-columns: repeat(auto-fit, minmax(130px, 1fr)); gap: 10px;
           margin: 16px 0; }
.number { border: 1px solid var(--line); border-radius: 8px; padding: 10px 12px; }
.number b { display: block; font-size: 22px; font-weight: 600; color: var(--accent); }
.number span { color: var(--soft); font-size: 13px; }
.figures { display: grid; gap: 12px;
           grid-template-columns: repeat(auto-fit, minmax(min(420px, 100%), 1fr)); }
.figure svg { max-width: 100%; height: auto; display: block; overflow: visible; }
.figure text { fill: var(--ink); }
.scroll { overflow-x: auto; }
.scroll svg { max-width: none; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { padding: 4px 10px; text-align: right; border-bottom: 1px solid var(--line);
         white-space: nowrap; }
th { font-weight: 600; font-size: 13px; color: var(--soft); }
th:first-child, td:first-child, .text th { text-align: left; }
.text td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.text td:first-child { white-space: nowrap; }
figure { margin: 12px 0; }
figure img { width: 100%; height: auto; border: 1px solid var(--line); border-radius: 6px; }
figcaption { color: var(--soft); font-size: 13px; overflow-wrap: anywhere; }
@media (max-width: 600px) {  /* a row becomes a paragraph, in which each cell has its name */
  table, tbody, tr, .text td { display: block; }
  tr { padding: 8px 0; border-bottom: 1px solid var(--line); }
  tr:first-child { display: none; }
  td { display: inline-block; padding: 2px 12px 2px 0; border: 0; }
  td::before { content: attr(data-name) ": "; color: var(--soft); }
}
</style>
</head>
<body>
<h1>$title</h1>
<p>$subtitle</p>
$content
</body>
</html>
""")


class Page:
    """Collects the sections of the page."""

    def __init__(self, title: str, subtitle: str) -> None:
        self._title, self._subtitle = title, subtitle
        self._sections: list[str] = []

    def section(self, title: str, note: str = "") -> None:
        self._sections.append(f"<h2>{html.escape(title)}</h2>")
        if note:
            self._sections.append(f"<p>{html.escape(note)}</p>")

    def numbers(self, values: Mapping[str, str]) -> None:
        """Large figures, each with its meaning."""
        cells = (
            f'<div class="number"><b>{html.escape(value)}</b><span>{html.escape(name)}</span></div>'
            for name, value in values.items()
        )
        self._sections.append(f'<div class="numbers">{"".join(cells)}</div>')

    def figures(self, *figures: str) -> None:
        """Figures beside each other where the window is wide enough, else below each other; those
        in SVG in their own size, or as :func:`to_svg` says where the window is narrower.
        """
        self._sections.append(f'<div class="figures">{"".join(figures)}</div>')

    def table(self, head: Sequence[str], rows: Iterable[Sequence[Any]], text: bool = False) -> None:
        """Numbers, or with ``text`` words, that wrap."""
        kind = ' class="text"' if text else ""
        names = [f' data-name="{html.escape(name)}"' for name in head]
        lines = ["<tr>" + "".join(f"<th>{html.escape(name)}</th>" for name in head) + "</tr>"]
        for row in rows:
            cells = zip(names, map(_cell, row), strict=True)
            line = "".join(f"<td{name}>{html.escape(cell)}</td>" for name, cell in cells)
            lines.append(f"<tr>{line}</tr>")
        self._sections.append(f'<div class="scroll"><table{kind}>{"".join(lines)}</table></div>')

    def text(self) -> str:
        return _PAGE.substitute(
            title=html.escape(self._title),
            subtitle=html.escape(self._subtitle),
            content="\n".join(self._sections),
        )


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return "–" if np.isnan(value) else f"{value:.3g}" if abs(value) < 1 else f"{value:.1f}"
    return str(value)
