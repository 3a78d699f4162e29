#!/usr/bin/env bash
# Sets of heads at equal attention, for figures/heads: prompts of `make steering-prompts`, a block for each third. Repeat it after a stop,
# and it resumes.
#
#     analyses/heads/run.sh                                     # then analyses/heads/equal_attention.py judge results/heads
#     GRID=wording FIRST=199 analyses/heads/run.sh              # from prompt 199, into results/heads-wording; GRID=soft, too
#     GRID=gemma FIRST=199 MODEL=FOLDER analyses/heads/run.sh   # another copy of the model that the grid names
set -euo pipefail
name=${GRID:-sentiment}
grid=$(realpath "$(dirname "$0")")/$name.toml
prompts=$(realpath bases/rivals.txt)
size=$(sed -n 's/^prompts = .* n = \([0-9]*\),.*/\1/p' "$grid" | head -1)
[[ $name == sentiment ]] && out=$(realpath -m results/heads) || out=$(realpath -m "results/heads-$name")
mkdir -p "$out-prompts"
cd "$out-prompts"
for third in 0 1 2; do
    first=$((${FIRST:-1} + third * size))
    sed -n "$first,$((first + size - 1))p" "$prompts" > "heads-$((third + 1)).txt"
done
lapa2 sweep "$grid" --out "$out" --workers "${WORKERS:-1}" ${MODEL:+--set "model=$MODEL"} --yes
