"""``smlp data inspect``: what binary data contain, and whether they are complete."""
