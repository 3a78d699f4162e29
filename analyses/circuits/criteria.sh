#!/usr/bin/env bash
# Criteria of circuits, for figures/circuits/criteria. First the heads, on other prompts:
#
#     make steering-prompts
#     lapa2 select smollm2-135m --prompts bases/select-sentiment.txt --score slope --heads 24 --out sentiment.json
#     lapa2 select smollm2-135m --task topic --prompts bases/select-topic.txt --score slope --heads 24 --out topic.json
#     lapa2 select FOLDER --prompts bases/select-sentiment.txt --score slope --heads 6 --out gemma.json    # Gemma 3 270M
#     analyses/circuits/criteria.sh [SETTING]; python analyses/circuits/draw_criteria.py
#
# Planned on 2026-11-29, before its first number. Prompts are those that the headlines are scored on, 16 tokens of each text (32 were
# planned, with 10 random K and 8 heads of the greedy one, and changed before the first number, for time). lex on sentiment; on topic js,
# since lex of all heads is too small there. Tests, by prompt, with Holm's correction over all of both models and tasks: chosen minus all
# heads; the same without the greedy K, and without the random one; chosen and opposing heads minus all; all but the opposing minus all;
# and each chosen head's minimality. The heads are complete if the gap's interval stays within a fifth of all heads' control. The
# opposing heads explain that chosen heads give more than all, if all without them give more than all, and chosen and opposing heads do
# not.
set -euo pipefail
here=$(dirname "$0")
for setting in ${1:-sentiment topic gemma}; do
    case $setting in
    sentiment) options=(--task sentiment --prompts bases/sentiment.txt --further 260) ;;
    # Before its first number, for time: 3 random K, 2 heads of the greedy one.
    topic) options=(--task topic --prompts bases/topic.txt --further 60 --metric js --random 3 --greedy 2) ;;
    gemma) options=(--task sentiment --prompts bases/sentiment.txt --further 100) ;;
    esac
    sizes=(--n 24 --tokens 16 --random 5 --greedy 4)
    python "$here/criteria.py" "$setting.json" "${sizes[@]}" "${options[@]}" --out "criteria/$setting"
done
