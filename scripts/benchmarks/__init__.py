"""Parts of scripts/benchmark.py: what is timed, against which peers, and how."""
