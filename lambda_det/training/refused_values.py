"""Find the key of a configuration whose value a library has refused.

A library says what it refuses and seldom the key: "Unknown pooler type: RoIAlign", or an assertion
without a word. The statement that raised the error says the rest: the values that it looks at, and
what it compares them with. Where one of them is the value of a key, the user has typed it.
"""

from __future__ import annotations

import ast
import linecache
import re
import traceback
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

from lambda_det.errors import ConfigError, reason, suggest

__all__ = ["REFUSALS", "refused_value"]

# By which libraries refuse a value
REFUSALS = (ValueError, LookupError, AssertionError, NotImplementedError)
_OURS = str(Path(__file__).parents[1])
_MOST_KEYS = 4  # a value that more keys have says nothing about one of them
_MOST_CHOICES = 8  # that a sentence lists
_KEY = re.compile(r"[A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)+")  # in the words of an error
_UNPACKING = "not enough values to unpack", "too many values to unpack"
_LIBRARIES = {"detectron2": "Detectron2", "torch": "PyTorch"}


class _Statement(NamedTuple):
    """The statement of a frame that raised an error, or that called what raised it.

    Attributes:
        frame: of the call.
        node: of the syntax tree.
        decisive: the expressions that decided: an assertion's condition, or what is raised and the
            conditions around it.
        conditions: all conditions around it.
    """

    frame: FrameType
    node: ast.stmt
    decisive: tuple[ast.AST, ...]
    conditions: tuple[ast.AST, ...] = ()

    @property
    def registered(self) -> Mapping[str, Any]:
        """The entries of the registry whose method the statement is of."""
        return getattr(self.frame.f_locals.get("self"), "_obj_map", {})

    def nodes(self) -> Iterator[ast.AST]:
        """All expressions that decided, from the outside in."""
        for part in self.decisive:
            yield from ast.walk(part)


class _Suspect(NamedTuple):
    """A value that a statement looks at, by the name of its variable or attribute."""

    name: str
    value: Any


def refused_value(error: BaseException, values: Iterable[tuple[str, Any]]) -> ConfigError | None:
    """The sentence about the key whose value a library refused; None where no key has it.

    What this package itself raises is no refusal of a library.

    Args:
        error: one of :data:`REFUSALS`, with its traceback.
        values: the keys of the configuration with their values.
    """
    values = dict(values)
    calls = list(traceback.walk_tb(error.__traceback__))
    for depth, (frame, line) in enumerate(reversed(calls)):
        if frame.f_code.co_filename.startswith(_OURS):
            return None
        statement = _statement(frame, line)
        if statement is None:
            continue
        if depth == 0 and (keys := _named_keys(error, statement, values)):
            what = " and ".join(f"{key} is {values[key]!r}" for key in keys)
            return _sentence(error, statement, what, None)
        for suspect in _suspects(error, statement, is_innermost=depth == 0):
            if keys := _keys_of(suspect, values):
                value = suspect.value if isinstance(suspect.value, str) else values[keys[0]]
                verbs = (
                    ("is", "are") if all(values[k] == value for k in keys) else ("names", "name")
                )
                what = f"{' and '.join(keys)} {verbs[len(keys) > 1]} {value!r}"
                return _sentence(error, statement, what, suspect)
    return None


# ----------------------------------------------------------------------------- what was looked at
def _statement(frame: FrameType, line: int) -> _Statement | None:
    """The innermost statement of a line; None without its source."""
    text = "".join(linecache.getlines(frame.f_code.co_filename))
    try:
        node: ast.AST | None = ast.parse(text)
    except (SyntaxError, ValueError):  # of code that is in no file of Python
        return None
    path: list[ast.AST] = []
    while node is not None:
        path.append(node)
        node = next((s for s in _blocks(node) if s.lineno <= line <= s.end_lineno), None)
    innermost = path[-1]
    conditions = tuple(parent.test for parent in path if isinstance(parent, ast.If))
    if isinstance(innermost, ast.Assert):
        return _Statement(frame, innermost, (innermost.test,), conditions)
    if isinstance(innermost, ast.Raise):
        return _Statement(frame, innermost, (innermost, *conditions))
    return _Statement(frame, innermost, (innermost,)) if isinstance(innermost, ast.stmt) else None


def _blocks(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements directly within a statement."""
    for _, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else ():
            if isinstance(child, ast.stmt):
                yield child
            elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
                yield from _blocks(child)


def _suspects(
    error: BaseException, statement: _Statement, *, is_innermost: bool
) -> Iterator[_Suspect]:
    """The values that a statement looks at and that its error is about."""
    text, node = str(error), statement.node
    if statement.registered:
        yield _Suspect("name", statement.frame.f_locals.get("name"))
        return
    if is_innermost and isinstance(error, KeyError) and not isinstance(node, ast.Raise):
        yield _Suspect(_index_name(error, statement), error.args[0])
        return
    for suspect in filter(None, (_value(each, statement.frame) for each in statement.nodes())):
        if not _is_plain(suspect.value):
            continue
        is_asserted = isinstance(node, ast.Assert)
        is_compared = isinstance(node, ast.Raise) and bool(_compared(statement, suspect.name))
        is_unpacked = isinstance(suspect.value, (list, tuple)) and text.startswith(_UNPACKING)
        is_decisive = is_innermost and (is_asserted or is_compared or is_unpacked)
        if is_decisive or _is_quoted(suspect.value, text):
            yield suspect


def _is_quoted(value: Any, text: str) -> bool:
    """Whether the words of an error have a value that is a word."""
    is_word = isinstance(value, str) and value != ""
    return is_word and bool(re.search(rf"(?<!\w){re.escape(value)}(?!\w)", text))


def _value(node: ast.AST, frame: FrameType) -> _Suspect | None:
    """The value of a variable, or of an attribute of ``self``."""
    if isinstance(node, ast.Name) and node.id in frame.f_locals:
        return _Suspect(node.id, frame.f_locals[node.id])
    if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
        attributes = getattr(frame.f_locals.get("self"), "__dict__", {})
        if node.attr in attributes:
            return _Suspect(node.attr, attributes[node.attr])
    return None


def _index_name(error: KeyError, statement: _Statement) -> str:
    """The variable whose value a mapping did not have; "" for none."""
    for node in statement.nodes():
        if isinstance(node, ast.Subscript):
            index = _value(node.slice, statement.frame)
            if index and index.value == error.args[0]:
                return index.name
    return ""


def _is_plain(value: Any) -> bool:
    """Whether a configuration can hold a value: a tensor cannot even be compared with one."""
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, (str, int, float))


# ------------------------------------------------------------------------------------ of which key
def _named_keys(
    error: BaseException, statement: _Statement, values: Mapping[str, Any]
) -> list[str]:
    """The keys in the words of an error, or in a condition: cfg.MODEL.POINT_HEAD.NUM_CLASSES."""
    found = _KEY.findall(str(error))
    if isinstance(statement.node, (ast.Assert, ast.Raise)):
        chains = (ast.unparse(n) for n in statement.nodes() if isinstance(n, ast.Attribute))
        found += [chain.rpartition("cfg.")[2] for chain in chains if "cfg." in chain]
    return [key for key in dict.fromkeys(found) if key in values]


def _keys_of(suspect: _Suspect, values: Mapping[str, Any]) -> list[str]:
    """The keys that have a value, those with the name of the variable first.

    A number, or an empty value, is only that of a key whose name is alike.
    """
    equal = [key for key, value in values.items() if _is_in(suspect.value, value)]
    alike = [key for key in equal if _is_alike(key, suspect.name)]
    is_rare = isinstance(suspect.value, (str, list, tuple)) and len(suspect.value) > 0
    keys = alike or (equal if is_rare else [])
    return keys if len(keys) <= _MOST_KEYS else []


def _is_in(one: Any, value: Any) -> bool:
    if isinstance(one, str) and isinstance(value, (list, tuple)):
        return one in value
    return isinstance(one, bool) == isinstance(value, bool) and _listed(one) == _listed(value)


def _listed(value: Any) -> Any:
    """A value with lists in place of tuples."""
    return [_listed(each) for each in value] if isinstance(value, (list, tuple)) else value


def _is_alike(key: str, name: str) -> bool:
    """Whether a variable has the name of a key, or one of both names ends with the other."""
    last, name = f"_{key.rpartition('.')[2].lower()}", f"_{name.lower().lstrip('_')}"
    return name != "_" and (last.endswith(name) or name.endswith(last))


# --------------------------------------------------------------------------------- what is allowed
def _sentence(
    error: BaseException, statement: _Statement, what: str, suspect: _Suspect | None
) -> ConfigError:
    if suspect and statement.registered:
        return ConfigError(
            f"{what}, which is not registered with Detectron2"
            f"{suggest(str(suspect.value), statement.registered)} A name of your own project is "
            "registered when its module is imported (docs/use_in_your_project.md)."
        )
    if suspect and (choices := _choices(error, statement, suspect)):
        if len(choices) > _MOST_CHOICES and isinstance(suspect.value, str):
            return ConfigError(f"{what}{suggest(suspect.value, map(str, choices))}")
        *others, last = map(repr, choices)
        return ConfigError(
            f"{what}; it can be {', '.join(others)}{' or ' if others else ''}{last}."
        )
    module = statement.frame.f_globals.get("__name__", "").partition(".")[0]
    library, node = _LIBRARIES.get(module, module), statement.node
    has_words = re.search("[a-z]{2}", reason(error).removeprefix(type(error).__name__))
    if isinstance(node, ast.Assert) and not has_words:
        return ConfigError(f"{what}; {library} asks for `{ast.unparse(node.test)}`.")
    return ConfigError(f"{what}; {library} says: {reason(error)}")


def _choices(error: BaseException, statement: _Statement, suspect: _Suspect) -> list[Any]:
    """The values that would not have been refused; [] where the statement does not list them."""
    if isinstance(error, KeyError) and not isinstance(statement.node, ast.Raise):
        for node in statement.nodes():
            if isinstance(node, ast.Subscript) and (keys := _entries(node.value, statement.frame)):
                return keys
    return _compared(statement, suspect.name)


def _entries(node: ast.AST, frame: FrameType) -> list[Any]:
    """The keys of a mapping that is written there, or that a variable holds."""
    if isinstance(node, ast.Dict):
        return [key.value for key in node.keys if isinstance(key, ast.Constant)]
    held = _value(node, frame)
    return list(held.value) if held and isinstance(held.value, Mapping) else []


def _compared(statement: _Statement, name: str) -> list[Any]:
    """The constants that conditions compare a variable with: ``x == "a"``, ``x in ("a", "b")``."""
    found: list[ast.AST] = []
    for node in (
        n for part in (*statement.decisive, *statement.conditions) for n in ast.walk(part)
    ):
        if not isinstance(node, ast.Compare) or len(node.ops) != 1:
            continue
        if ast.unparse(node.left).removeprefix("self.") == name:
            other = node.comparators[0]
            if isinstance(node.ops[0], (ast.Eq, ast.NotEq)):
                found.append(other)
            elif isinstance(node.ops[0], (ast.In, ast.NotIn)):
                found += getattr(other, "elts", [])
    constants = (node.value for node in found if isinstance(node, ast.Constant))
    return sorted(dict.fromkeys(constants), key=str)
