"""``smlp data glue`` and ``smlp data squad``: data for fine-tuning, from the benchmarks or your own."""
