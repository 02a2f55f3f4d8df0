"""Read options from a fairseq command line before fairseq parses it."""

from __future__ import annotations

from smlp.errors import UserError


def option_value(argv: list[str], *names: str) -> str | None:
    """Return the last value given for an option, as ``--name VALUE`` or ``--name=VALUE``; None if it is not given."""
    value = None
    for position, word in enumerate(argv):
        name, equals, attached = word.partition("=")
        if name in names:
            if equals:
                value = attached
            elif position + 1 < len(argv):
                value = argv[position + 1]
    return value


def has_option(argv: list[str], *names: str) -> bool:
    """Return whether one of the options is given, as ``--name VALUE`` or ``--name=VALUE``."""
    return any(word.partition("=")[0] in names for word in argv)


def positive_number(arguments: list[str], name: str) -> int | None:
    """Return the value of an option; None if it is not given.

    Raises:
        UserError: it is not a number of at least 1.
    """
    if not has_option(arguments, name):
        return None
    text = option_value(arguments, name) or ""
    if not text.isdecimal() or int(text) < 1:
        raise UserError(f"{name} needs a number of at least 1, not {text!r}")
    return int(text)


def without_options(arguments: list[str], *names: str) -> list[str]:
    """Return the arguments without these options and their values."""
    kept, words = [], iter(arguments)
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in names:
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept
