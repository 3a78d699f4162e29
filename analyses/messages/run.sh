#!/usr/bin/env bash
# All stages of analyses/messages, in the current folder. FOLDER is that of `make models`. Repeat it after a stop, and it resumes; tables
# go to figures/messages. The pilot was judged before the plan of the test, and is made anew only without figures/messages/pilot.csv.
#
#     analyses/messages/run.sh FOLDER
set -euo pipefail
models=$(realpath "$1")
model=qwen2.5-coder-1.5b-instruct
here=$(dirname "$(realpath "$0")")
root=$(dirname "$(dirname "$here")")
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
stage() {
    python "$here/chats.py" "$1" $model --models "$models"
    local folder=made/$model/messages/$1
    [ -f "$folder/grid.toml" ] || return 0
    lapa2 sweep "$folder/grid.toml" --out "$folder/run" --workers 1 --yes --allow-code
    python "$here/analyse.py" "$1" $model --models "$models"
}
[ -f "$root/figures/messages/pilot.csv" ] || stage pilot
python "$here/chats.py" heads $model --models "$models"
# Tuning has three rounds, and the test has six arms; a stage that has nothing left to make makes nothing.
for name in neutral tune tune tune test test test test test test alarm; do
    stage $name
done
python "$here/measures.py" $model --models "$models"
python "$here/draw.py" $model
