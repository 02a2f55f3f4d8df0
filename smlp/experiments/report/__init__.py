"""``smlp compare report``: tables and figures of an experiment, from its folder alone (docs/compare.md).

results      reads the folder; what is missing or half done is noted, never an error
timeline     seconds of training by update, from a run's log
table        means with intervals; tables whose cells name the file and field that they come from
quality      tables of perplexity
speed        the table of time and quality
machine      where runs were trained, and the table of where their time went
health       tables of routing
studies      tables for Figures 4 and 7, Tables 6 and 7
details      tables of the models, data order, tuning, and incomplete runs
paper        what the paper prints, and tables of it
draw_curves  figures with a line for each model
draw_points  figures with a point for each model
figures      all figures and their captions
write        the page and all other files
"""
