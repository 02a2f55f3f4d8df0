"""The ``smlp`` command. ``main.py`` holds the table of subcommands; each module beside it is one of them."""
