#!/usr/bin/env bash
# The soft prefixes that ship for SmolLM2, and a contrastive set for detox that does not: two hours of two cores; repeat it after a stop,
# and it resumes. Corpora come from the hub; other files, and Jigsaw's comments, are given as SENTIMENT="--data FILE --held-out FILE"
# and so on.
set -euo pipefail
: "${SENTIMENT:=--data sst2 --data imdb}" "${TOPIC:=--data agnews}" "${DETOX:=--data jigsaw_train.jsonl}"
out=results/prefixes
train() {  # TASK OBJECTIVE LIMIT CHECK ARGUMENTS
    lapa2 prefix train --task "$1" --objective "$2" --set limit="$3" --set check_every="$4" "${@:5}" --out "$out/$1-$2"
}
again() {  # TASK LIMIT CHECK LR ARGUMENTS: contrastive, from the set of likelihood
    train "$1" contrastive "$2" "$3" --start-from "$out/$1-mle" --set lr="$4" "${@:5}"
}
train sentiment mle 5400 60 $SENTIMENT
train topic mle 2200 60 $TOPIC --set start=random
train detox mle 4000 60 $DETOX --set start=random
again sentiment 4200 60 0.01 $SENTIMENT
again topic 500 40 0.01 $TOPIC
again detox 1500 60 0.01 $DETOX
