"""lm-evaluation-harness on checkpoints of this package; needs the extra ``lm-eval``."""
