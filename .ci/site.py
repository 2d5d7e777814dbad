"""A hook of mkdocs: the pages that have no file in docs/, and links to files outside of it."""

import ast
import os
import re
from pathlib import Path

from mkdocs.structure.files import File

ROOT = Path(__file__).resolve().parents[1]
_ROLE = re.compile(r":(?:attr|class|data|func|meth|mod):(?=<code>)")
_LINK = re.compile(r"\[([^\]]*)\]\((?!https?:|#)([^)#\s]+)(#[^)\s]*)?\)")
# Pages of the site that lie outside docs/
_OUTSIDE = {"README.md": "index.md", "datasets/README.md": "datasets.md"}


def on_files(files, config):
    """Add the pages that lie outside docs/, and a page with all public names."""
    for place, page in _OUTSIDE.items():
        files.append(File.generated(config, page, content=_as_in_docs(place)))
    files.append(File.generated(config, "reference.md", content=_reference()))
    return files


def on_page_markdown(markdown, page, config, files):
    """Let links to files outside docs/ lead to the repository, or turn them into names where it is
    unknown.
    """

    def link(match):
        text, target, section = match[1], match[2], match[3] or ""
        place = os.path.normpath(os.path.join("docs", target))
        if place in _OUTSIDE:
            return f"[{text}]({_OUTSIDE[place]}{section})"
        if place.startswith("docs/"):
            return match[0]
        if not (ROOT / place).exists():
            return match[0]  # so --strict reports it
        url = config.repo_url
        return f"[{text}]({url.rstrip('/')}/blob/main/{place}{section})" if url else text

    return _LINK.sub(link, markdown)


def on_page_content(html, page, config, files):
    """Remove the roles before names in docstrings, such as :func:, which only Sphinx reads."""
    return _ROLE.sub("", html)


def _as_in_docs(place):
    """The text of a page outside docs/, with its links as a page in docs/ has them."""
    folder = os.path.dirname(place)

    def link(match):
        target = os.path.relpath(os.path.join(folder, match[2]), "docs")
        return f"[{match[1]}]({target}{match[3] or ''})"

    return _LINK.sub(link, (ROOT / place).read_text("utf-8"))


def _reference():
    """A directive of mkdocstrings for each public name, with the module that it is from."""
    source = ast.parse((ROOT / "lambda_det" / "__init__.py").read_text("utf-8"))
    found = {}
    for node in ast.walk(source):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("lambda_det"):
            found.update({name.name: node.module for name in node.names})
        elif isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            names = ast.literal_eval(node.value)
    parts = []
    for name in names:
        place = found[name]
        if (ROOT / place.replace(".", "/") / f"{name}.py").is_file():
            place += f".{name}"  # a function with the name of its module
        parts += [f"::: {place}.{name}\n"] * (not name.startswith("__"))
    text = "The public names of `lambda_det`. Each is imported from `lambda_det` itself.\n"
    return "\n".join(["# Python\n", text, *parts])
