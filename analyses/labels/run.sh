#!/usr/bin/env bash
# Texts behind headlines again, for figures/labels (analyses/labels/README.md says what was planned): rounds of 50 prompts (topic 20),
# all arms of a round before the next. Repeat it after a stop, and it resumes; more rounds may be added later.
#
#     make steering-prompts; analyses/labels/run.sh rtp_challenging_203.jsonl ROUNDS
#     python analyses/labels/analyse.py results/labels --train FILES --out figures/labels
set -euo pipefail
toxic=$(realpath "$1")
grid=$(realpath "$(dirname "$0")")/labels.toml
bases=$(realpath bases)
out=$(realpath -m results/labels)
for round in $(seq "$2"); do
    mkdir -p "$out-prompts/$round"
    cd "$out-prompts/$round"
    slice() { sed -n "$(((round - 1) * $2 + 1)),$((round * $2))p" "$1" > "$3"; }
    slice "$bases/undecided.txt" 50 undecided.txt
    slice "$bases/sentiment.txt" 50 sentiment.txt
    slice "$bases/topic.txt" 20 topic.txt
    slice "$toxic" 50 toxic.jsonl
    lapa2 sweep "$grid" --out "$out" --workers 1 --yes
done
cd "$(dirname "$bases/undecided.txt")" # the prefix alone on all prompts, as planned second
lapa2 sweep "$(dirname "$grid")/prefix.toml" --out "$out-prefix" --workers 1 --yes
lapa2 sweep "$(dirname "$grid")/soft.toml" --out "$out-soft" --workers 1 --yes # as planned third
lapa2 sweep "$(dirname "$grid")/attention.toml" --out "$out-attention" --workers 1 --yes # fourth
