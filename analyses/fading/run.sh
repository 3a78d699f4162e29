#!/usr/bin/env bash
# Why control fades: the committed numbers of figures/fading, on the first 64 of the steering prompts, in heads that were chosen on
# others. An hour of a core for each task; repeat it after a stop, and it resumes. `make fading` writes the prompts first.
set -euo pipefail
out=results/fading
mkdir -p $out
head -n 64 steering-prompts.txt > $out/prompts.txt
for task in sentiment topic; do
    random=5
    [ $task = topic ] && random=2
    lapa2 select smollm2-135m --task $task --prompts steering-selection.txt --score slope --heads 24 --positions auto --tokens 24 \
        --out $out/$task.json
    lapa2 fading smollm2-135m --task $task --prompts $out/prompts.txt --card $out/$task.json --random $random \
        --file $out/$task.lines --out $out/$task
    mkdir -p figures/fading/$task
    cp $out/$task/* figures/fading/$task/
done

# Further from the prompt, on fewer prompts and tokens.
further() {
    local task=$1 prompts=$2
    shift 2
    head -n "$prompts" steering-prompts.txt > $out/$task-fewer.txt
    lapa2 fading smollm2-135m --task "$task" --filler "$@" --tokens 16 --prompts $out/$task-fewer.txt \
        --card $out/$task.json --file $out/$task-1024.lines --out $out/$task-1024
    mkdir -p figures/fading/$task-1024
    cp $out/$task-1024/*.csv figures/fading/$task-1024/
}
further sentiment 32 64 256 512 1024
cp $out/sentiment-1024/fading.png figures/fading/sentiment-1024/
further topic 12 64 1024
