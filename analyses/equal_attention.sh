#!/usr/bin/env bash
# Sets of heads at equal attention, for figures/heads: 300 prompts of `make steering-prompts`, a block for each third. Repeat it after a
# stop, and it resumes.
set -euo pipefail
grid=$(realpath "$(dirname "$0")")/../figures/heads/sentiment.toml
prompts=$(realpath bases/rivals.txt)
out=$(realpath -m results/heads)
mkdir -p "$out-prompts"
cd "$out-prompts"
for third in 1 2 3; do
    sed -n "$(((third - 1) * 100 + 1)),$((third * 100))p" "$prompts" > "heads-$third.txt"
done
lapa2 sweep "$grid" --out "$out" --workers "${WORKERS:-1}" --yes
