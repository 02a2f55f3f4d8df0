"""Comparisons at equal FLOPs: an experiment in one file, its runs, and their report (``smlp compare``).

yaml_file     a YAML file in which every mistake is named
experiment    what such a file says
reading       reads and checks it
plan          what it means: models with their FLOPs, runs with their commands
folder        the files of an experiment, and the state of each run
data          data made from text, and what data hold
cost          how long it will take
processes     commands that run side by side and end with this one
local         runs on this machine
tuning        what a grid over one option has shown
slurm         runs on a cluster
progress      how far they are
scores        a trained model's loss on held-out text
speed         time of an update, models in turn
timing        starts that
updates       updates in a plain loop, timed
report        tables and figures of a folder, from its files alone
"""
