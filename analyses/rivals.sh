#!/usr/bin/env bash
# Rivals of the bias, for figures/rivals (docs/studies/rivals.md says what was planned): rounds of 100 prompts, all arms of a round
# before the next. Repeat it after a stop, and it resumes.
#
#     make steering-prompts; analyses/rivals.sh LAST [FIRST]    # rounds; scored ones need not be made again
#     python analyses/rivals.py results/rivals --judge FOLDER --out figures/rivals
set -euo pipefail
grid=$(realpath "$(dirname "$0")")/../figures/rivals/sentiment.toml
prompts=$(realpath bases/rivals.txt)
out=$(realpath -m results/rivals)
for round in $(seq "${2:-1}" "$1"); do
    mkdir -p "$out-prompts/$round"
    cd "$out-prompts/$round"
    sed -n "$(((round - 1) * 100 + 1)),$((round * 100))p" "$prompts" > prompts.txt
    lapa2 sweep "$grid" --out "$out" --workers "${WORKERS:-1}" --yes
done
