#!/usr/bin/env bash
# Claims on control that the grids quick/* leave undecided, on new prompts: those that need about three times their prompts at most
# (`required_prompts` of figures/paper/quick/tables/verdicts.md). Numbers of prompts and arms are fixed before the first text, and no
# text is looked at in between. Verdicts are those of the items' own scripts. With it the paper's 203 prompts of detoxification.
# 150,000 texts; every sweep tells its time first. Repeat it after a stop, and it resumes.
#
#     make steering-prompts; analyses/undecided/run.sh FOLDER
#     analyses/undecided/run.sh FOLDER --device cuda --set max_rows=1536
#
# Further arguments go to every sweep. FOLDER has rtp_challenging_203.jsonl, the paper's prompts, and rtp_challenging_1196.jsonl,
# very toxic ones of RealToxicityPrompts, with a text "prompt" on each line.
set -euo pipefail
data=$1
out=results/undecided
mkdir -p $out
head -n 300 bases/undecided.txt > $out/topic.txt
# 302 prompts of the wider set that the 203 do not have.
python - $data $out <<'END'
import sys
from pathlib import Path
from lapa2_interp.tasks.prompts import read_prompts
data, out = map(Path, sys.argv[1:])
known, wider = (read_prompts(data / f"rtp_challenging_{n}.jsonl") for n in (203, 1196))
new = [prompt for prompt in wider if prompt not in known and len(prompt.splitlines()) == 1]
(out / "toxic.txt").write_text("\n".join(new[:302]) + "\n", encoding="utf-8")
END
arms=(arm=baseline "arm=alpha 0.5 paper" "arm=alpha 0.5 released" "arm=alpha 0.5 paper, span bos")
for law in "linear" "sqrt" "constant, l0 128"; do arms+=("arm=alpha 0.5 paper, law $law"); done
for layers in bottom top even; do arms+=("arm=alpha 0.5 paper, layers $layers"); done
grids=(quick/scaling quick/layers quick/components quick/profile)
fixed=(--dtype bfloat16 --set trace=none --set model_class=TransformersModel "${@:2}")
sentiment='prompts={file="bases/undecided.txt", n=810, what="neutral ones of DExperts; `make steering-prompts`"}'
lapa2 sweep "${grids[@]}" --out $out/sentiment "${fixed[@]}" --set "$sentiment" --only task=sentiment "${arms[@]}"
lapa2 sweep quick/hard_prefix --out $out/wording "${fixed[@]}" --set "$sentiment" --only method=prefix \
    variant=TransformersModel "variant=prefix A {attribute} text:, TransformersModel"
lapa2 sweep quick/components --out $out/topic "${fixed[@]}" --set "prompts={file=\"$out/topic.txt\", n=300}" --only task=topic
lapa2 sweep "${grids[@]}" quick/alpha --out $out/toxic "${fixed[@]}" --set "prompts={file=\"$out/toxic.txt\", n=302}" \
    --only task=detox method=preadd
lapa2 sweep quick/detox --out $out/rtp203 "${fixed[@]}" --set "prompts={file=\"$data/rtp_challenging_203.jsonl\", n=203}" \
    --set samples=7 --only method=negprompt method=preadd method=palette
# Verdicts, of control alone: the items ask for a perplexity, and that of an untrained model is made in no time and left out.
judge() { python analyses/paper/$2.py $out/$1 --scorers accuracy toxicity perplexity=tiny-gpt2 --perplexity 60; }
for item in scaling layers components placement prefix_preadd_components; do judge sentiment $item; done
for item in scaling layers alpha placement prefix_preadd_components; do judge toxic $item; done
judge topic components
judge wording hard_prefix_robustness
python analyses/undecided/analyse.py $out/sentiment $out/topic $out/toxic $out/wording --before figures/paper/quick --out figures/undecided
python analyses/paper/detox.py $out/rtp203 --scorers toxicity perplexity --perplexity 200
cp $out/rtp203/tables/detox.{claims.csv,csv,json,md} figures/undecided/
