#!/usr/bin/env bash
# RoBERTa's corpora and the English part of CC100, for the paper's large models: about 470 GB of text, 86 billion tokens
# in 64 shards (the paper has 100 billion; little of Stories and BookCorpus is public today).
#
#   bash examples/data/roberta_cc100.sh OUT --dry-run --tasks 32 --workers 16
#   bash examples/data/roberta_cc100.sh OUT --tasks 32 --workers 16 -- --cpus-per-task 16 --mem 64G --time 24:00:00
#   then: bash examples/smlp_large.sh "$(echo OUT/bin/shard* | tr ' ' :)" checkpoints/smlp_large --bf16
#
# All of Wikipedia, PG-19 (for BookCorpus), OpenWebText, CC-News, CC-Stories' reproduction and CC100. BUDGET=50B takes
# that many tokens, with each corpus in proportion to its size. docs/data.md explains the choice.
#
# Disk: about 1.1 TB. Time: about 400 core hours on slow cores, half of them for reading CC-News' pages, most of the rest
# for cleaning, duplicates and tokens; less than an hour with 512 workers, except for CC100, a single file: half a day on
# one worker. Downloads: 134 GB and CC-News (many terabytes). Cost: 16 dollars at 0.04 a core hour. These are
# estimates by estimate.py, which --dry-run prints.
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
begin "$@"

sources=(wikipedia pg19 openwebtext cc-news cc-stories cc100-en)
[ "${#given[@]}" -eq 0 ] || sources=("${given[@]}")
[ -z "$dry_run" ] || rehearse roberta_cc100 -- "${sources[@]}"

get "${sources[@]}"
folders "${sources[@]}"
clean_and_dedup "${found[@]}"
learn_tokenizer "$out/unique"
held_out="$(small_or 0.00005 0.2)"
budget=()
[ -z "${BUDGET:-}" ] || budget=(--budget "$(small_or "${BUDGET:-}" 10K)" --unit tokens --tokenizer "$out/tokenizer")
step sample --in "$out/unique" --out "$out/sample" --valid "$held_out" --test "$held_out" --compress zst "${budget[@]}"
step binarize --in "$out/sample" --tokenizer "$out/tokenizer" --out "$out/bin" --shards "$(small_or 64 2)"
inspect "$out/bin"
