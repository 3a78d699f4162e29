#!/usr/bin/env bash
# Texts of analyses/detoxification/README.md, their labels and what they say: figures/detoxification.
# Repeat it after a stop, and it resumes.
#
#     analyses/detoxification/run.sh FOLDER
#
# FOLDER has rtp_challenging_203.jsonl, the paper's prompts, with a text "prompt" on each line.
set -euo pipefail
here=$(realpath "$(dirname "$0")")
out=$(realpath -m results/detoxification)
(cd "$1" && lapa2 sweep "$here/detoxification.toml" --out "$out" --workers 1 --yes "${@:2}")
python "$here/analyse.py" "$out" --out figures/detoxification
