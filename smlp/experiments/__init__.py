"""Comparisons at equal FLOPs: an experiment in one file, its runs, and their report (``smlp compare``).

yaml_file   a YAML file in which every mistake is named
spec        what an experiment's file says
reading     reads and checks it
plan        what it means: models with their FLOPs, runs with their commands
json_files  reads and writes the JSON files of an experiment
folder      the files of an experiment, and the state of each run
data        data made from text, and what data hold
dry_run     what would be done, how long it would take, how much disk it would need
run         everything that is left to do, here or on a cluster
local       runs on this machine
slurm       runs on a cluster
processes   commands that run side by side and end with this one
tuning      what a grid over one option has shown
progress    how far the runs are
scores      a trained model's loss on held-out text
speed       time of an update, models in turn
report      tables and figures of a folder, from its files alone
finetuning  a grid of fine-tunings of an encoder (``smlp finetune``)
medians     medians of fine-tunings over seeds
"""
