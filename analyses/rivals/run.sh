#!/usr/bin/env bash
# Rivals of the bias, for figures/rivals (analyses/rivals/README.md says what was planned): rounds of as many prompts as the grid says,
# all arms of a round before the next. Repeat it after a stop, and it resumes.
#
#     make steering-prompts; analyses/rivals/run.sh LAST [FIRST]    # rounds; scored ones need not be made again
#     python analyses/rivals/analyse.py results/rivals --judge FOLDER --out figures/rivals
#     TIER=topic analyses/rivals/run.sh 1                           # the grids besides sentiment have one round
#     MODEL=FOLDER TIER=gemma analyses/rivals/run.sh 1              # another copy of the model that the grid names
#     python analyses/rivals/analyse.py results/rivals-topic --judge FOLDER --planned 50 --out figures/rivals/topic
set -euo pipefail
tier=${TIER:-sentiment}
grid=$(realpath "$(dirname "$0")")/$tier.toml
prompts=$(realpath bases/rivals.txt)
size=$(sed -n 's/^prompts = .* n = \([0-9]*\),.*/\1/p' "$grid")
[[ $tier == sentiment ]] && out=$(realpath -m results/rivals) || out=$(realpath -m "results/rivals-$tier")
[[ $tier == sentiment ]] && skipped=0 || skipped=200    # prompts that no other grid has
for round in $(seq "${2:-1}" "$1"); do
    mkdir -p "$out-prompts/$round"
    cd "$out-prompts/$round"
    sed -n "$((skipped + (round - 1) * size + 1)),$((skipped + round * size))p" "$prompts" > prompts.txt
    lapa2 sweep "$grid" --out "$out" --workers "${WORKERS:-1}" ${MODEL:+--set "model=$MODEL"} --yes
done
