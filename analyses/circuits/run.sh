#!/usr/bin/env bash
# Which heads carry the control: the committed tables and pages of figures/circuits. Two hours of two cores; repeat it after a stop, and
# it resumes. `circuits.sh paper`: those of the paper's GPT-2 medium, four times the work, in results/paper/circuits; DEVICE=cuda puts
# them on a GPU.
set -euo pipefail
if [ "${1-}" = paper ]; then
    out=results/paper/circuits model=gpt2-medium
else
    out=results/circuits model=smollm2-135m
    lapa2 circuits planted --out $out/planted
fi
lapa2 circuits $model ${DEVICE:+--device "$DEVICE"} --task sentiment --out $out/sentiment
lapa2 circuits $model ${DEVICE:+--device "$DEVICE"} --task topic --tokens 16 --best 8 --out $out/topic
[ "${1-}" = paper ] && exit
for task in planted sentiment topic; do
    mkdir -p figures/circuits/$task
    cp $out/$task/{*.csv,report.html,circuit.json,heads.json,contrast_set.json} figures/circuits/$task/
done
