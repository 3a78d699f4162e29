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
    lapa2 fading smollm2-135m --task $task --prompts $out/prompts.txt --selection $out/$task.json --random $random \
        --file $out/$task.lines --out $out/$task
    mkdir -p figures/fading/$task
    cp $out/$task/* figures/fading/$task/
done

# Further from the prompt, on fewer prompts and tokens.
head -n 32 steering-prompts.txt > $out/fewer.txt
lapa2 fading smollm2-135m --task sentiment --filler 64 256 512 1024 --tokens 16 --prompts $out/fewer.txt \
    --selection $out/sentiment.json --file $out/sentiment-1024.lines --out $out/sentiment-1024
mkdir -p figures/fading/sentiment-1024
cp $out/sentiment-1024/* figures/fading/sentiment-1024/
