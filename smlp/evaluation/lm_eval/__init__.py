"""lm-evaluation-harness on checkpoints of this package; needs the extra ``lm-eval``.

model   a checkpoint as the harness wants to see a model
tasks   the harness's own versions of the six zero-shot tasks, on local files
"""
