#!/usr/bin/env bash
# All stages of a model of analyses/learned, in the folder in which analyses/families/run.sh worked, which has bases/ of
# `make steering-prompts`. FOLDER is that of `make models`. Repeat it after a stop, and it resumes; tables go to figures/learned.
#
#     analyses/learned/run.sh FOLDER smollm2-135m
#     python analyses/learned/analyse.py read smollm2-135m --models FOLDER    # the reader, once the texts are there
set -euo pipefail
models=$(realpath "$1")
model=$2
here=$(dirname "$(realpath "$0")")
for stage in pairs train compare; do
    python "$here/train.py" $stage "$model" --models "$models"
done
# Tuning has three rounds; one that has nothing left to try makes nothing.
for stage in tune tune tune test; do
    python "$here/grids.py" $stage "$model" --models "$models"
    [ -f "made/$model/learned-$stage.toml" ] || continue
    lapa2 sweep "made/$model/learned-$stage.toml" --out "made/$model/learned-$stage" --workers 1 --yes --allow-code
    python "$here/analyse.py" $stage "$model" --models "$models"
done
