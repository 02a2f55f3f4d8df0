"""Zero-shot priming on the six tasks of the paper (smlp.txt, section 4.5).

items       one record of each task
files       finding and parsing the official files
readers     official files to records
templates   records to the texts that are scored
rules       log-probabilities of tokens to scores of candidates
metrics     accuracy with its uncertainty, exact match and F1
"""
