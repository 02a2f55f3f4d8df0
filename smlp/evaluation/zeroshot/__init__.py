"""Zero-shot priming on the six tasks of the paper (Yu et al., 2022, section 4.5).

files       finding and parsing the official files
readers     official files to records
templates   records to the texts that are scored
score       texts to ids that fit a model, and to log-probabilities on any number of ranks
partial     log-probabilities that survive a stopped command
rules       log-probabilities to scores of candidates, and the quality of choices
evaluate    a task from its files to a choice for every record
report      numbers of a task, tables, JSON lines
"""
