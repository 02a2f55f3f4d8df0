"""The one exception for mistakes a user can correct."""


class UserError(ValueError):
    """Bad input: the message is one sentence that names the field or file and the numbers.

    Commands print it as a single line and exit with status 1; Python callers catch it as a ``ValueError``.
    """
