"""Log-probabilities of texts, as candidates of a choice or on their own.

texts        a context and its continuation as ids that fit a model
encoding     the same for one model, as the user wants it
batching     which of them are read together, and what only once
targets      logits only where a token is scored
candidates   their log-probabilities
text_scores  the same for people who compare a handful of texts
capacity     places at experts in evaluation: none dropped, or as many as asked for
"""
