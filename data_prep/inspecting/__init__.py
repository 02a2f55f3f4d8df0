"""``smlp data inspect``: what binary data hold, and whether they are whole."""
