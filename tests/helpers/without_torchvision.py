"""Import this before transformers, which needs no torchvision but fails where one was built for another torch."""

import sys

try:
    import torchvision  # noqa: F401
except (ImportError, RuntimeError):
    sys.modules["torchvision"] = None
