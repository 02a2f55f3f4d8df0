"""Zero-shot priming on the six tasks of the paper (smlp.txt, section 4.5).

items       one record of each task
files       finding and parsing the official files
readers     official files to records
templates   records to the texts that are scored
priming     solved examples before them
prepare     texts to ids that fit a model, with counts of what had to give way
score       log-probabilities of tokens, on any number of ranks
rules       log-probabilities of tokens to scores of candidates
evaluate    a task from its files to a choice for every record
metrics     accuracy with its uncertainty, exact match and F1
report      numbers of a task, tables, JSON lines
"""
