"""Find the key of a configuration whose value a library has refused.

A library says what it refuses and seldom the key: "Unknown pooler type: RoIAlign", or an assertion
without a word. The statement that raised the error says the rest: the values that it looks at, and
what it compares them with. Where one of them is the value of a key, the user has given it.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, NamedTuple

from lambda_det.errors import ConfigError, reason, suggest

__all__ = ["REFUSALS", "refused_value"]

# By which libraries refuse a value
REFUSALS = (
    ValueError,
    LookupError,
    AssertionError,
    NotImplementedError,
    OverflowError,
    ZeroDivisionError,
)
_OURS = str(Path(__file__).parents[1])
_MOST_KEYS = 4  # a value that more keys have says nothing about one of them
_MOST_CHOICES = 8  # that a sentence lists
_KEY = re.compile(r"[A-Z][A-Z0-9_]*(?:\.[A-Z0-9_]+)+")  # in the words of an error
_STACK = "Traceback (most recent call last)"
_LIBRARIES = {"detectron2": "Detectron2", "torch": "PyTorch"}


class _Statement(NamedTuple):
    """The statement of a frame that raised an error, or that called what raised it.

    Attributes:
        frame: of the call.
        function: the syntax tree of the function.
        node: of the statement.
        decisive: the expressions that decided: an assertion's condition; what is raised and the
            conditions around it; or the arguments of the call.
        conditions: all conditions around it.
    """

    frame: FrameType
    function: ast.AST
    node: ast.stmt
    decisive: tuple[ast.AST, ...]
    conditions: tuple[ast.AST, ...] = ()

    @property
    def registered(self) -> Mapping[str, Any]:
        """The entries of the registry whose method the statement is of."""
        return getattr(self.frame.f_locals.get("self"), "_obj_map", {})

    @property
    def words(self) -> set[str]:
        """The words in the names that it uses, and in the name of its function."""
        names = [getattr(self.function, "name", "")]
        for node in ast.walk(self.node):
            names += [getattr(node, field, None) or "" for field in ("id", "attr", "arg")]
        return {word for name in names for word in name.lower().split("_") if len(word) > 2}

    def nodes(self) -> Iterator[ast.AST]:
        """All expressions that decided, from the outside in."""
        for tree in self.decisive:
            yield from ast.walk(tree)


class _Suspect(NamedTuple):
    """A value that a statement looks at, by the name of its variable or attribute."""

    name: str
    value: Any


def refused_value(error: BaseException, values: Iterable[tuple[str, Any]]) -> ConfigError | None:
    """The sentence about the key whose value a library refused; None where no key has it.

    What this package itself raises is no refusal of a library. Nor is an error of a loader process,
    whose words are a stack: any key in its source lines would be blamed.

    Args:
        error: one of :data:`REFUSALS`, with its traceback.
        values: the keys of the configuration with their values.
    """
    if _STACK in str(error):
        return None
    values, statements = dict(values), _statements(error)
    for find in (_in_the_statement, _in_the_calls, _behind_a_constructor) if statements else ():
        if found := find(error, statements, values):
            return _sentence(error, found, values)
    return None


class _Found(NamedTuple):
    """The keys of what was refused.

    Attributes:
        keys: one or more.
        statement: that says what is allowed.
        suspect: the value that all keys have; None where they have several.
    """

    keys: list[str]
    statement: _Statement
    suspect: _Suspect | None = None


def _in_the_statement(
    error: BaseException, statements: list[_Statement], values: Mapping[str, Any]
) -> _Found | None:
    """The keys that the innermost statement names, or whose values it looks at."""
    innermost, *callers = statements
    named = _named_keys(str(error), innermost, values)
    suspects = _suspects(error, innermost, is_innermost=True)
    found = ((each, _keys_of(each, innermost, values, str(error))) for each in suspects)
    looked_at = [(suspect, keys) for suspect, keys in found if keys]
    if named or (isinstance(innermost.node, ast.Assert) and len(looked_at) > 1):
        # an assertion may compare several keys
        keys = dict.fromkeys([*named, *(key for _, keys in looked_at for key in keys)])
        return _Found(list(keys), innermost)
    if not looked_at:
        return None
    suspect, keys = looked_at[0]
    if len(keys) > 1:  # the call says which
        calls = (_keys_in(caller.decisive, values) for caller in callers)
        if read := next((read for read in calls if not set(keys).isdisjoint(read)), []):
            return _Found(read, innermost)
    return _Found(keys, innermost, suspect)


def _in_the_calls(
    error: BaseException, statements: list[_Statement], values: Mapping[str, Any]
) -> _Found | None:
    """The keys of arguments that stand in the words of the error."""
    for caller in statements[1:]:
        for suspect in _suspects(error, caller, is_innermost=False):
            if keys := _keys_of(suspect, caller, values, str(error)):
                return _Found(keys, caller, suspect)
    return None


def _behind_a_constructor(
    error: BaseException, statements: list[_Statement], values: Mapping[str, Any]
) -> _Found | None:
    """The keys of which a caller, or ``from_config``, made what a constructor refused.

    What fails in a step is made of images and weights as well, and is not traced.
    """
    is_constructor = statements[-1].frame.f_code.co_name == "__init__"
    has_configuration = any("cfg" in each.frame.f_locals for each in statements)
    if isinstance(error, LookupError) or not (is_constructor or has_configuration):
        return None
    nodes = list(statements[0].nodes())
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    names |= {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    for statement in statements:
        sources = _sources(statement.function, statement.decisive)
        keys = _keys_in(sources, values)
        for suspect in (_value(n, statement.frame) for tree in sources for n in ast.walk(tree)):
            if suspect and _is_plain(suspect.value):
                equal = (key for key, value in values.items() if _is_in(suspect.value, value))
                keys += [key for key in equal if _is_alike(key, suspect.name)]
        if from_config := statement.frame.f_locals.get("from_config_func"):
            keys += _keys_of_arguments(from_config, names, values)
        keys = list(dict.fromkeys(keys))
        if 0 < len(keys) <= _MOST_KEYS:
            return _Found(keys, statements[0])
    return None


# ----------------------------------------------------------------------------- what was looked at
def _statements(error: BaseException) -> list[_Statement]:
    """The statements of libraries that led to an error, the innermost first."""
    calls: list[TracebackType] = []
    place = error.__traceback__
    while place is not None:
        calls.append(place)
        place = place.tb_next
    found = []
    for place in reversed(calls):
        if place.tb_frame.f_code.co_filename.startswith(_OURS):
            break
        if statement := _statement(place, is_innermost=not found):
            found.append(statement)
    return found


def _statement(place: TracebackType, *, is_innermost: bool) -> _Statement | None:
    """The innermost statement at a place; None without its source."""
    frame, line = place.tb_frame, place.tb_lineno
    text = "".join(linecache.getlines(frame.f_code.co_filename))
    try:
        node: ast.AST | None = ast.parse(text)
    except (SyntaxError, ValueError):  # of code that is in no file of Python
        return None
    path: list[ast.AST] = []
    while node is not None:
        path.append(node)
        node = next((s for s in _blocks(node) if s.lineno <= line <= s.end_lineno), None)
    last = path[-1]
    if not isinstance(last, ast.stmt):
        return None
    function = next((n for n in reversed(path) if isinstance(n, ast.FunctionDef)), last)
    conditions = tuple(parent.test for parent in path if isinstance(parent, ast.If))
    decisive: tuple[ast.AST, ...] = (last,)
    if not is_innermost:
        decisive = _arguments(place, last) or decisive
    elif isinstance(last, ast.Assert):
        decisive = (last.test,)
    elif isinstance(last, ast.Raise):
        decisive = (last, *conditions)
    return _Statement(frame, function, last, decisive, conditions)


def _blocks(node: ast.AST) -> Iterator[ast.stmt]:
    """The statements directly within a statement."""
    for _, value in ast.iter_fields(node):
        for child in value if isinstance(value, list) else ():
            if isinstance(child, ast.stmt):
                yield child
            elif isinstance(child, (ast.ExceptHandler, ast.match_case)):
                yield from _blocks(child)


def _arguments(place: TracebackType, statement: ast.stmt) -> tuple[ast.AST, ...]:
    """The arguments of the call that a frame is in."""
    positions = list(place.tb_frame.f_code.co_positions())[place.tb_lasti // 2]
    for node in ast.walk(statement):
        if isinstance(node, ast.Call):
            here = node.lineno, node.end_lineno, node.col_offset, node.end_col_offset
            if here == tuple(positions):
                return (*node.args, *(keyword.value for keyword in node.keywords))
    return ()


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
        is_decisive = is_innermost and (is_asserted or is_compared)
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
def _named_keys(text: str, statement: _Statement, values: Mapping[str, Any]) -> list[str]:
    """The keys in the words of an error, or in what was asserted."""
    found = [key for key in _KEY.findall(text) if key in values]
    if isinstance(statement.node, (ast.Assert, ast.Raise)):
        found += _keys_in(statement.decisive, values)
    return list(dict.fromkeys(found))


def _keys_in(trees: Iterable[ast.AST], values: Mapping[str, Any]) -> list[str]:
    """The keys that expressions read, such as ``cfg.MODEL.POINT_HEAD.NUM_CLASSES``."""
    nodes = (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute))
    chains = (chain for chain in map(ast.unparse, nodes) if "cfg." in chain)
    named = dict.fromkeys(chain.rpartition("cfg.")[2] for chain in chains)
    return [key for key in named if key in values]


def _keys_of(
    suspect: _Suspect, statement: _Statement, values: Mapping[str, Any], text: str
) -> list[str]:
    """The keys that have a value which a statement looks at.

    A key has it where its name is like the variable's, or is in the text. Without such a key,
    a word or a list belongs to the keys of whose name the statement uses a word, as in_features
    beside a variable f. Other keys have the same value by chance.
    """
    equal = [key for key, value in values.items() if _is_in(suspect.value, value)]
    words = set(re.findall(r"\w+", text.lower()))
    keys = [k for k in equal if _is_alike(k, suspect.name) or k.split(".")[-1].lower() in words]
    is_rare = isinstance(suspect.value, (str, list, tuple)) and len(suspect.value) > 0
    if is_rare and not keys:
        names = {key: key.split(".")[-1].lower().split("_") for key in equal}
        used = statement.words
        keys = [k for k in equal if statement.registered or not used.isdisjoint(names[k])]
    return keys if len(keys) <= _MOST_KEYS else []


def _keys_of_arguments(
    from_config: Callable, names: set[str], values: Mapping[str, Any]
) -> list[str]:
    """The keys that a ``from_config`` of Detectron2 reads for arguments of some names."""
    try:
        function = ast.parse(textwrap.dedent(inspect.getsource(from_config)))
    except (OSError, TypeError, SyntaxError):  # it has no source
        return []
    given: list[ast.AST] = []
    for node in ast.walk(function):
        if isinstance(node, ast.Dict):
            pairs = zip(node.keys, node.values, strict=True)
            given += [v for k, v in pairs if isinstance(k, ast.Constant) and k.value in names]
        elif isinstance(node, ast.keyword) and node.arg in names:
            given.append(node.value)
    return _keys_in(_sources(function, tuple(given)), values)


def _sources(function: ast.AST, trees: tuple[ast.AST, ...]) -> tuple[ast.AST, ...]:
    """Expressions, the expressions assigned to the variables in them, and so on."""
    assigned: dict[str, list[ast.AST]] = {}
    for node in ast.walk(function):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Name):
                assigned.setdefault(target.id, []).append(node.value)
    found, names = list(trees), set()
    for tree in found:  # which grows
        for node in ast.walk(tree):
            if isinstance(node, ast.Name) and node.id not in names:
                names.add(node.id)
                found += assigned.get(node.id, [])
    return tuple(found)


def _is_in(one: Any, value: Any) -> bool:
    if isinstance(one, str) and isinstance(value, (list, tuple)):
        return any(one == each or _is_in(one, each) for each in value if not isinstance(each, dict))
    return isinstance(one, bool) == isinstance(value, bool) and _listed(one) == _listed(value)


def _listed(value: Any) -> Any:
    """A value with lists in place of tuples."""
    return [_listed(each) for each in value] if isinstance(value, (list, tuple)) else value


def _is_alike(key: str, name: str) -> bool:
    """Whether a variable has the name of a key, or one of both names ends with the other."""
    last, name = f"_{key.rpartition('.')[2].lower()}", f"_{name.lower().lstrip('_')}"
    return name != "_" and (last.endswith(name) or name.endswith(last))


# --------------------------------------------------------------------------------- what is allowed
def _sentence(error: BaseException, found: _Found, values: Mapping[str, Any]) -> ConfigError:
    keys, statement, suspect = found
    if suspect is None:
        what = " and ".join(f"{key} is {values[key]!r}" for key in keys)
    else:
        value = suspect.value if isinstance(suspect.value, str) else values[keys[0]]
        verbs = ("is", "are") if all(values[k] == value for k in keys) else ("names", "name")
        what = f"{' and '.join(keys)} {verbs[len(keys) > 1]} {value!r}"
    if suspect and statement.registered:
        return ConfigError(
            f"{what}, which is not registered with Detectron2"
            f"{suggest(str(suspect.value), statement.registered)} A name of your own project is "
            "registered when its module is imported (docs/use_in_your_project.md)."
        )
    choices = _choices(error, statement, suspect) if suspect else []
    if choices and suspect.value not in choices:  # or the value was not all that was refused
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
            is_read = isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
            if is_read and (keys := _entries(node.value, statement.frame)):
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
        n for tree in (*statement.decisive, *statement.conditions) for n in ast.walk(tree)
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
