"""Measure trained models: perplexity, leaks, and the paper's zero-shot tasks."""

#: values of fairseq's ``--sample-break-mode``: how a text is cut into samples
BREAK_MODES = ("none", "complete", "complete_doc", "eos")
#: end of a document: an empty line, or every line
DOCUMENTS = ("empty-line", "line")
