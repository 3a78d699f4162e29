#!/usr/bin/env bash
# All stages of a model of analyses/families, in the current folder, which has bases/ of `make steering-prompts`. FOLDER is that of
# `make models`. Repeat it after a stop, and it resumes; tables go to figures/families.
#
#     analyses/families/run.sh FOLDER smollm2-135m
#     analyses/families/run.sh FOLDER qwen2.5-coder-0.5b-instruct first-token more    # its own stages, after the others
#     python analyses/families/reader.py agree --models FOLDER    # once; then, for each of smollm2-135m and gemma-3-270m
#     python analyses/families/reader.py label smollm2-135m --models FOLDER; python analyses/families/analyse.py compare
set -euo pipefail
models=$(realpath "$1")
model=$2
here=$(dirname "$(realpath "$0")")
read -r heads prompts cards place <<< "$(python "$here/grids.py" cards "$model" --models "$models")"
mkdir -p "made/$model/cards"
for card in $(seq "$cards"); do
    file=made/$model/cards/$card.json
    [ -f "$file" ] && continue
    head -n "$prompts" "bases/families-select-$card.txt" > "made/$model/cards/$card.txt"
    lapa2 select "$place" --prompts "made/$model/cards/$card.txt" --score slope --heads "$heads" --out "$file"
done
python "$here/analyse.py" cards "$model" --models "$models"
# Tuning has three rounds; one that has nothing left to try makes nothing.
[ $# -gt 2 ] || set -- "$1" "$2" layers tune tune tune test
for stage in "${@:3}"; do
    python "$here/grids.py" $stage "$model" --models "$models"
    [ -f "made/$model/$stage.toml" ] || continue
    lapa2 sweep "made/$model/$stage.toml" --out "made/$model/$stage" --workers 1 --yes
    python "$here/analyse.py" $stage "$model" --models "$models"
done
