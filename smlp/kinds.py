"""The older name of :mod:`smlp.extend`."""

from smlp.extend import *  # noqa: F403
