"""Read YAML files of settings and name every mistake: duplicate keys, unknown names, values of the wrong type."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import yaml

from smlp.errors import UserError
from smlp.files import read_text

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
_COUNT = re.compile(r"([0-9][0-9_]{0,99}(?:\.[0-9]{1,99})?(?:e[0-9]{1,3})?)\s*([kmb]?)", re.IGNORECASE)
MOST_COUNT = 10**18
_MOST_VALUES = 10**6  # most values of a file after expanding aliases
_SHOWN = 100  # most characters of a value in a message
_MERGE = "tag:yaml.org,2002:merge"
_NAME = re.compile(r"[A-Za-z]\w*")


class _Loader(yaml.SafeLoader):
    """PyYAML's loader, but it refuses duplicate keys, of which PyYAML keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == _MERGE:
                raise yaml.MarkedYAMLError(
                    problem="'<<' is not supported: write the settings out", problem_mark=key_node.start_mark
                )
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, (str, int, float, bool)):
                if key in seen:
                    raise yaml.MarkedYAMLError(problem=f"{key!r} is given twice", problem_mark=key_node.start_mark)
                seen.add(key)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            return super().construct_object(node, deep)
        except (ValueError, OverflowError) as error:  # an impossible date or number
            problem = f"a value cannot be read: {error}"
        except (LookupError, AttributeError):  # a tag of another kind
            problem = f"a value cannot be read as {node.tag.rpartition(':')[2]}"
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)

    def construct_number(self, node: yaml.ScalarNode) -> float:
        is_whole = node.tag.endswith(":int")
        number = self.construct_yaml_int(node) if is_whole else self.construct_yaml_float(node)
        # octal, or of base 60
        if ":" in node.value or (is_whole and re.match(r"[-+]?0[0-9_]", node.value) and number != int(node.value)):
            raise yaml.MarkedYAMLError(
                problem=f"{node.value} means {number:g} in YAML: write it in decimals, or in quotes if it is no number",
                problem_mark=node.start_mark,
            )
        return number


for _kind_of_number in ("int", "float"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind_of_number}", _Loader.construct_number)


def read_yaml(path: Path) -> dict[str, Any]:
    """Read the mapping in a file.

    Raises:
        UserError: it cannot be read, is no YAML, or holds something else; the message names file and line.
    """
    try:
        content = yaml.load(read_text(path), _Loader)  # a subclass of the safe loader
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}") from None
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise UserError(f"{path}{line}: {error.problem or 'not YAML'}") from None
    except yaml.YAMLError as error:
        raise UserError(f"{path} is not YAML: {' '.join(str(error).split())}") from None
    except RecursionError:
        raise UserError(f"{path} is nested too deep") from None
    try:
        num_values = _num_values(content, {})
    except RecursionError:
        raise UserError(f"{path}: an alias is used inside its own value") from None
    except UnicodeEncodeError as error:
        raise UserError(f"{path}: {shown(error.object)} has a lone surrogate, which is not Unicode text") from None
    if num_values > _MOST_VALUES:
        raise UserError(f"{path} has {num_values:,} values with aliases expanded; at most {_MOST_VALUES:,} are read")
    if not isinstance(content, dict):
        raise UserError(f"{path} holds {_kind(content)}; names with values are expected")
    return content


def _num_values(value: Any, known: dict[int, int]) -> int:
    """Count the values with every alias written out; ``known`` has the counts by identity of lists and mappings."""
    if isinstance(value, str):
        value.encode()  # raises UnicodeEncodeError for half a surrogate pair
    if not isinstance(value, (list, dict)):
        return 1
    if id(value) not in known:
        inside = value if isinstance(value, list) else [*value, *value.values()]
        known[id(value)] = 1 + sum(_num_values(item, known) for item in inside)
    return known[id(value)]


def shown(value: Any) -> str:
    """Return a value for a message, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python refuses to print numbers of more than 4300 digits
        return "a number of thousands of digits"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def number_in(value: Any) -> Any:
    """Return the number that a text says, such as ``1e-3``, which is text in YAML; else the value."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


class Section:
    """A part of the file: names with values, each of which is taken once; leftovers are an error.

    Args:
        name: of the section, for messages, such as ``run``; empty at the top.
        content: what the file has there.
        path: the file.
    """

    def __init__(self, name: str, content: Any, path: Path) -> None:
        self.name, self.path = name, path
        if content is None:
            content = {}
        if not isinstance(content, Mapping):
            raise UserError(f"{path}: {name} must be names with values, got {_kind(content)}")
        self._content = dict(content)
        self._known: list[str] = []

    def __contains__(self, key: str) -> bool:
        return self._content.get(key) is not None

    def full(self, key: str) -> str:
        """Return the full name of a value for messages."""
        return f"{self.name}.{key}" if self.name else key

    def take(self, key: str, default: Any = None) -> Any:
        """Take a value as it is."""
        self._known.append(key)
        value = self._content.pop(key, None)
        return default if value is None else value

    def section(self, key: str) -> Section:
        """Take a section of this section; empty if it is missing."""
        return Section(self.full(key), self.take(key), self.path)

    def text(self, key: str, default: str | None = None, choices: Iterable[str] = ()) -> str | None:
        """Take a word or a line."""
        value = self.take(key, default)
        if value is not None and not isinstance(value, str):
            raise self.error(key, f"must be text, got {shown(value)}")
        allowed = list(choices)
        if allowed and value not in allowed:
            raise self.error(key, f"must be one of {', '.join(allowed)}, got {shown(value)}")
        return value

    def count(self, key: str, default: int | None = None, least: int = 1) -> int | None:
        """Take a whole number, also written 400k, 1.5M or 100B."""
        value = self.take(key, default)
        return None if value is None else self.as_count(key, value, least)

    def as_count(self, key: str, value: Any, least: int = 1, most: int = MOST_COUNT) -> int:
        """Read a value as a whole number."""
        number = value
        if isinstance(value, str) and (match := _COUNT.fullmatch(value.strip())):
            number = Decimal(match[1].replace("_", "")) * _UNITS[match[2].lower()]
        is_number = isinstance(number, (int, float, Decimal)) and not isinstance(number, bool)
        if is_number and not isinstance(number, int):
            is_number = abs(number) <= MOST_COUNT and number == int(number)
        if not is_number:
            raise self.error(key, f"must be a whole number, got {shown(value)}")
        if number < least:
            raise self.error(key, f"must be at least {least}, got {shown(value)}")
        if number > most:
            raise self.error(key, f"must be at most {most:,}, got {shown(value)}")
        return int(number)

    def number(self, key: str, default: float | None = None) -> float | None:
        """Take a positive number."""
        value = self.take(key, default)
        return None if value is None else self.as_number(key, value)

    def as_number(self, key: str, value: Any) -> float:
        """Read a value as a positive number; YAML takes 1e-3 for text."""
        try:
            number = float("nan") if isinstance(value, bool) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = float("nan")
        if not 0 < number < float("inf"):
            raise self.error(key, f"must be a positive number, got {shown(value)}")
        return number

    def values(self, key: str, default: Iterable[Any] = ()) -> list[Any]:
        """Take a list; a single value stands for a list of one."""
        value = self.take(key)
        if value is None:
            return list(default)
        return list(value) if isinstance(value, list) else [value]

    def items(self) -> dict[str, Any]:
        """Take everything that is left, by the names in the file."""
        left, self._content = self._content, {}
        bad = [key for key in left if not isinstance(key, str)]
        if bad:
            raise self.error(str(bad[0]), f"is {_kind(bad[0])}, where a name is expected")
        return left

    def settings(self) -> dict[str, Any]:
        """Take everything that is left, with names in the style of Python."""
        found: dict[str, Any] = {}
        for key, value in self.items().items():
            name = key.replace("-", "_")
            if not _NAME.fullmatch(name):
                raise self.error(key, "is not the name of a setting; a value with a comma needs quotes inside { }")
            if name in found:
                raise self.error(key, "is given twice, with a dash and with an underscore")
            found[name] = value
        return found

    def end(self) -> None:
        """Refuse leftovers.

        Raises:
            UserError: the message names the first of them.
        """
        for key in self._content:
            close = difflib.get_close_matches(str(key), self._known, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(self._known)}"
            raise self.error(str(key), f"is unknown; {hint}")

    def error(self, key: str, text: str) -> UserError:
        """Return an error about a value, with its file and name."""
        return UserError(f"{self.path}: {self.full(key)} {text}")


def _kind(value: Any) -> str:
    names = {list: "a list", str: "text", dict: "names with values", type(None): "nothing", bool: "a truth value"}
    names |= {int: "a number", float: "a number", date: "a date", datetime: "a date", bytes: "bytes", set: "a set"}
    return names.get(type(value), type(value).__name__)
