#!/usr/bin/env bash
# The scorers that ship: the linear ones take minutes, the adapters about six hours of one core; repeat it after a stop, and it resumes.
# `scorers.sh DATA`: a folder of corpora as files of text and label: IMDb, SST-2, AG News, Jigsaw, ParaDetox, and RealToxicityPrompts
# with Perspective's scores. bfloat16 halves the time where the processor has units for it; the weights then differ in their last digits.
set -euo pipefail
data=${1-data}
linear="lapa2 scorers train --out results/scorers --task"
adapter="python analyses/scorers/train_adapters.py --out results/scorers --dtype ${SCORER_DTYPE:-bfloat16} --passes 3 --task"
sentiment="--data $data/sentiment/imdb_train.jsonl.xz --test $data/sentiment/sst2_valid.jsonl.xz --data $data/sentiment/sst2_train.jsonl.xz"
topic="--data $data/topic/agnews_train.jsonl.xz --data $data/topic/agnews_valid.jsonl.xz --test $data/topic/agnews_test.jsonl.xz"
detox="--data $data/toxicity/jigsaw_train.jsonl.xz --data $data/toxicity/paradetox.jsonl.xz=0.2
    --graded $data/toxicity/rtp_perspective.jsonl.xz=8"
valid=$data/toxicity/jigsaw_valid.jsonl.xz test=$data/toxicity/jigsaw_test.jsonl.xz

$linear sentiment --c 1 $sentiment=3 --test "$data/sentiment/imdb_test.jsonl.xz"
$linear topic --c 20 $topic
$linear detox --c 1 $detox --data "$valid" --test "$test"
$adapter sentiment $sentiment=2 --per-pass 8000
$adapter topic $topic --per-pass 33300
$adapter detox $detox --per-pass 9000 --test "$valid" --test "$test"
