"""The ``smlp`` command. ``main.py`` has the table of subcommands; most other modules are one subcommand each."""
