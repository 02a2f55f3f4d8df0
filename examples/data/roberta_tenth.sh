#!/usr/bin/env bash
# A tenth of RoBERTa's corpora, for the paper's small models: about 15 GB of text, 2.7 billion tokens in ten shards.
#
#   bash examples/data/roberta_tenth.sh OUT --dry-run     estimates time and disk, and rehearses all steps
#   bash examples/data/roberta_tenth.sh OUT               options: examples/data/steps.sh
#   then: bash examples/smlp.sh "$(echo OUT/bin/shard* | tr ' ' :)" checkpoints/smlp --bf16
#
# A tenth of Wikipedia, PG-19 (instead of BookCorpus, which is no longer available) and OpenWebText is drawn by hashes of
# documents. CC-News is limited to three of its thirty months, because its download is a hundred times its English text.
# CC-Stories' reproduction, smaller than a tenth of Stories, is used whole. docs/data.md explains the choice.
#
# Disk: about 60 GB, and one downloaded file for each worker. Time: about 40 core hours on slow cores, 27 of them for
# reading the pages of Wikipedia and CC-News: 2.5 hours with 16 workers; and the download, 52 GB and CC-News' three months
# (about a terabyte). Cost: 1.6 dollars at 0.04 a core hour. These are estimates by estimate.py, which --dry-run prints.
source "$(dirname "${BASH_SOURCE[0]}")/steps.sh"
begin "$@"

drawn=(wikipedia pg19 openwebtext) whole=(cc-news cc-stories)
months=(--set cc-news.months=2018-01:2018-03)
if [ "${#given[@]}" -gt 0 ]; then
    drawn=("${given[@]}") whole=() months=()
fi
[ -z "$dry_run" ] || rehearse roberta_tenth --fraction 0.1 --part cc-news=0.1 -- "${drawn[@]}" "${whole[@]}" "${months[@]}"

get "${drawn[@]}" "${whole[@]}" "${months[@]}"
folders "${drawn[@]}"
step sample --in "${found[@]}" --out "$out/tenth" --fraction "$(small_or 0.1 0.9)" --valid 0 --test 0 --compress zst
folders "${whole[@]}"
clean_and_dedup "$out/tenth/train" "${found[@]}"
held_out="$(small_or 0.0005 0.2)"
step sample --in "$out/unique" --out "$out/sample" --valid "$held_out" --test "$held_out" --compress zst
learn_tokenizer "$out/sample/train"
step binarize --in "$out/sample" --tokenizer "$out/tokenizer" --out "$out/bin" --shards "$(small_or 10 2)"
inspect "$out/bin"
