"""Exceptions that reach a user as one line."""


class UserError(ValueError):
    """Bad input: the message is one sentence that names the field or file and the numbers.

    Commands print it as a single line and exit with status 1; Python callers catch it as a ``ValueError``.
    """


class NaNError(UserError, FloatingPointError):
    """Not-a-number where none may be: training has diverged, or the weights are damaged."""
