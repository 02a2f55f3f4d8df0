"""Docstrings of Python source files, read from the syntax tree: nothing is imported or executed."""

from __future__ import annotations

import ast
import inspect
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

# Installed packages; tests; other people's packages under another name (their text would come twice).
SKIPPED_FOLDERS = frozenset({"__pycache__", "site-packages", "dist-packages"}).union(
    {"test", "tests", "testing", "idle_test"}, {"_vendor", "vendored", "_vendored", "externals"}
)

# Functions that attach documentation to objects written in C, and are called where Python source carries the text.
DOC_SETTERS = frozenset({"add_newdoc", "add_docstr", "_add_docstr", "add_docstr_all", "add_newdoc_for_scalar_type"})


def source_files(root: Path) -> Iterator[Path]:
    """Python files below ``root`` (or ``root`` itself, if it is a file), sorted, without tests and vendored copies."""
    if root.is_file():
        yield root
        return
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = sorted(name for name in subfolders if name not in SKIPPED_FOLDERS)
        for name in sorted(names):
            if name.endswith(".py"):
                yield Path(folder) / name


def docstrings(source: bytes) -> list[str]:
    """The docstrings of one source file in the order in which they stand there, dedented.

    Covers modules, classes and functions, and strings handed to a documentation setter such as ``add_newdoc``.
    A file that is not valid Python (a template, a file for another version) has none.
    """
    if b'"""' not in source and b"'''" not in source:
        return []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # invalid escapes in other people's strings
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError):
            return []
    return list(_docs_in(tree))


def _docs_in(node: ast.AST) -> Iterator[str]:
    """Walks statements only: expressions make up most of a tree and hold no definitions."""
    if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        text = ast.get_docstring(node)
        if text:
            yield text
    for field in ("body", "orelse", "finalbody"):
        for child in getattr(node, field, []):
            if isinstance(child, ast.Expr) and isinstance(child.value, ast.Call):
                yield from _docs_in_call(child.value)
            elif hasattr(child, "body"):
                yield from _docs_in(child)


def _docs_in_call(call: ast.Call) -> Iterator[str]:
    name = getattr(call.func, "id", None) or getattr(call.func, "attr", None)
    if name not in DOC_SETTERS:
        return
    for argument in call.args:
        for node in ast.walk(argument):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" in node.value:
                yield inspect.cleandoc(node.value)
