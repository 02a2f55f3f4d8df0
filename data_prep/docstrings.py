"""Read the docstrings of Python source files, and the blocks of running text in them.

They are read from the syntax tree: nothing is imported or executed. Removed are sections, code, tables and field lists
as scientific packages write them: numpydoc and Google-style sections, reST directives, roles and field lists, doctests.
The rest may still not be English; :mod:`data_prep.prose` decides that.
"""

from __future__ import annotations

import ast
import inspect
import os
import re
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

# Installed packages, tests, and vendored packages, whose text would occur twice.
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"}).union(
    {"test", "tests", "testing", "idle_test"}, {"_vendor", "vendored", "_vendored", "externals"}
)

# Functions that attach documentation to objects written in C; the text is in the Python source of the call.
DOC_SETTERS = frozenset({"add_newdoc", "add_docstr", "_add_docstr", "add_docstr_all", "add_newdoc_for_scalar_type"})


def source_files(root: Path) -> Iterator[Path]:
    """Yield the Python files below the folder ``root``, sorted, without tests and vendored ones."""
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py") and (Path(folder) / name).is_file():
                yield Path(folder) / name


def docstrings(source: bytes) -> list[str]:
    """Return the docstrings of one source file in order, dedented.

    These are the docstrings of modules, classes and functions, and strings passed to a documentation setter such as
    ``add_newdoc``; definitions in ``except`` blocks and cases of ``match`` are left out. A file that is not valid
    Python (a template, a file for another version) has none, nor has one that is nested too deep to parse, or one
    without a triple quote.
    """
    if b'"""' not in source and b"'''" not in source:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError):  # the last two: its nesting
            return []
    return list(_docs_in(tree))


def _docs_in(tree: ast.AST) -> Iterator[str]:
    """Walk statements only: expressions make up most of a tree and hold no definitions."""
    todo = [tree]  # no recursion: each ``elif`` lies in the one before
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield from _docs_in_call(node.value)
        is_documented = isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
        if is_documented and (text := ast.get_docstring(node)):
            yield text
        children = [child for name in ("body", "orelse", "finalbody") for child in getattr(node, name, [])]
        todo += reversed(children)


def _docs_in_call(call: ast.Call) -> Iterator[str]:
    name = getattr(call.func, "id", None) or getattr(call.func, "attr", None)
    if name not in DOC_SETTERS:
        return
    for argument in call.args:
        for node in ast.walk(argument):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
                yield inspect.cleandoc(node.value)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split(", "))


# Sections whose body is code, names or citations.
_DROPPED_SECTIONS = _names(
    "example, examples, basic usage, usage, references, reference, see also, seealso, shape, methods, grammar, author, "
    "authors, related functions, routine listings"
)
# Sections that list names with their descriptions.
_LIST_SECTIONS = _names(
    "parameters, params, other parameters, keyword parameters, args, arguments, keyword args, keyword arguments, "
    "attributes, class attributes, returns, return, yields, yield, receives, raises, warns, exceptions, inputs, input, "
    "outputs, output, explanation"
)
_PLAIN_SECTIONS = _names("note, notes, warning, warnings, todo, description, details, hint, tip")
_KEPT_DIRECTIVES = _names("note, warning, tip, hint, important, caution, attention")

_UNDERLINE = re.compile(r"([=\-~^\"'#*+.])\1{2,}$")
_TABLE = re.compile(r"[=+|\-: ]{4,}$|.*\|.*\|")
_DIRECTIVE = re.compile(r"\.\.(?:\s+([\w:-]+?)::)?(?:\s+(.*))?$")
_FIELD = re.compile(r":(\w[^:`]*):(?:\s+(.*))?$")
_TEXT_FIELDS = re.compile(r"(param|parameter|arg|argument|key|keyword|return|returns|raise|raises|except|ivar|var)\b")
_BULLET = re.compile(r"(?:[-*+•]|\(?(?:\d{1,2}|[a-z]|[ivx]+)[.)]|#\.)\s+(?=\S)")
_GOOGLE_HEADER = re.compile(r"([A-Z][\w ]{1,20}):{1,2}$")
_GOOGLE_ITEM = re.compile(r"[*`]{0,3}[\w., *`-]{1,40}?\s*(?:(?:\([^)]*\)|\[[^\]]*\])\s*)?:\s+(?=\S)")
_DOCTEST = re.compile(r">>>|In \[\d|\$ |% python")


@dataclass
class _BlockReader:
    """State of one pass over a docstring's lines."""

    removed: Counter[str]
    blocks: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    indent: int | None = None  # of the lines of the open block; None: any
    skip_deeper_than: int | None = None  # code and dropped bodies: skip lines indented deeper than this
    skip_to_blank: bool = False
    literal_after: int | None = None  # a paragraph ended in "::" at this indent
    section: str = ""
    section_indent: int = 0
    underlined: bool = False  # the section has a numpydoc underline: its body is not indented

    def flush(self) -> None:
        if self.lines:
            text = " ".join(self.lines)
            if text.endswith("::"):
                text = text[:-1]
            self.blocks.append(text)
        self.lines, self.indent = [], None

    def start(self, text: str, indent: int | None) -> None:
        self.flush()
        self.lines, self.indent = [text], indent


def text_blocks(docstring: str, removed: Counter[str]) -> list[str]:
    """Return paragraphs and list items of a dedented docstring, each on one line, reST inline markup still in place.

    ``removed`` counts the lines that each rule removed, under "lines: RULE".
    """
    reader = _BlockReader(removed)
    rows = docstring.expandtabs().split("\n")
    for number, row in enumerate(rows):
        text = row.strip()
        following = rows[number + 1].strip() if number + 1 < len(rows) else ""
        _read_line(reader, text, len(row) - len(row.lstrip()), following)
    reader.flush()
    return reader.blocks


def _read_line(reader: _BlockReader, text: str, indent: int, following: str) -> None:
    if not text:
        if reader.lines and reader.lines[-1].endswith("::"):
            reader.literal_after = reader.indent if reader.indent is not None else 0
        reader.flush()
        reader.skip_to_blank = False
        return
    if _UNDERLINE.match(text):
        reader.removed["lines: underline"] += 1
        return
    if _UNDERLINE.match(following) and len(following) >= len(text) - 2:
        _open_section(reader, text.rstrip(":").lower(), indent, underlined=True)
        return
    if _skipped(reader, indent):
        return
    header = _GOOGLE_HEADER.match(text)
    if header and header.group(1).lower() in _DROPPED_SECTIONS | _LIST_SECTIONS | _PLAIN_SECTIONS:
        _open_section(reader, header.group(1).lower(), indent, underlined=False)
    elif _DOCTEST.match(text):
        reader.flush()
        reader.skip_to_blank = True
        reader.removed["lines: doctest"] += 1
    elif text.startswith(".."):
        _read_directive(reader, text, indent)
    elif _TABLE.match(text):
        reader.flush()
        reader.removed["lines: table"] += 1
        reader.skip_to_blank = True
    else:
        _read_text(reader, text, indent)


def _open_section(reader: _BlockReader, name: str, indent: int, *, underlined: bool) -> None:
    reader.flush()
    reader.removed["lines: section header"] += 1
    reader.section, reader.section_indent, reader.underlined = name, indent, underlined
    reader.skip_deeper_than = reader.literal_after = None
    if name in _DROPPED_SECTIONS:
        reader.skip_deeper_than = indent - 1 if underlined else indent


def _skipped(reader: _BlockReader, indent: int) -> bool:
    """Return whether the line belongs to a body being skipped (a literal block, a directive, a section, a doctest)."""
    if reader.literal_after is not None:
        if indent > reader.literal_after:
            reader.skip_deeper_than = reader.literal_after
        reader.literal_after = None
    if reader.skip_to_blank:
        reader.removed["lines: doctest or table body"] += 1
        return True
    if reader.skip_deeper_than is not None:
        if indent > reader.skip_deeper_than:
            reader.removed["lines: code block or dropped section"] += 1
            return True
        reader.skip_deeper_than = None
        reader.section = ""
    return False


def _read_directive(reader: _BlockReader, text: str, indent: int) -> None:
    reader.flush()
    match = _DIRECTIVE.match(text)
    name, argument = (match.group(1), match.group(2)) if match else (None, None)
    if name in _KEPT_DIRECTIVES:
        if argument:
            reader.start(argument, None)
        return
    reader.removed["lines: directive"] += 1
    reader.skip_deeper_than = indent


def _read_text(reader: _BlockReader, text: str, indent: int) -> None:
    in_list = reader.section in _LIST_SECTIONS
    if in_list and reader.underlined and indent <= reader.section_indent:
        # numpydoc: names and types stand at the section's indent, descriptions below them deeper. Sections that hold
        # prose at that indent ("Returns" of some packages) lose it: the two cannot be told apart.
        reader.flush()
        reader.removed["lines: parameter line"] += 1
        return
    if in_list and not reader.underlined and indent <= reader.section_indent:
        reader.section = ""
        in_list = False
    field_match = _FIELD.match(text)
    if field_match:
        if _TEXT_FIELDS.match(field_match.group(1)) and field_match.group(2):
            reader.start(field_match.group(2), None)
        else:
            reader.flush()
            reader.removed["lines: field"] += 1
        return
    if in_list and not reader.underlined:
        item = _GOOGLE_ITEM.match(text)
        if item and (not reader.lines or indent <= (reader.indent or indent)):
            reader.start(text[item.end() :], None)
            return
    bullet = _BULLET.match(text)
    if bullet:
        reader.start(text[bullet.end() :], None)
    elif reader.lines and (reader.indent is None or indent == reader.indent):
        reader.lines.append(text)
        reader.indent = indent
    else:
        reader.start(text, indent)
