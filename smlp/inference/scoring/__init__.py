"""Log-probabilities of texts, as candidates of a choice or on their own.

texts       a context and its continuation as ids that fit a model
batching    which of them are read together, and what is read only once
candidates  their log-probabilities
"""
