"""Read options from a fairseq command line before fairseq parses it."""

from __future__ import annotations


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
