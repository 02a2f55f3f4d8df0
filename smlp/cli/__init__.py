"""The ``smlp`` command. ``main.py`` has the table of subcommands; most modules beside it are one subcommand each."""
