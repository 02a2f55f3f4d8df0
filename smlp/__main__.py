"""``python -m smlp`` is the ``smlp`` command."""

import sys

from smlp.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
