#!/bin/sh
# Trains the groups whose name begins with PREFIX for at most SECONDS, on a machine that has this folder, the parts of
# docs/reproduction-how.md in carry/, and nothing else; what is finished goes to OUT/runs.tar.gz. Called again on the same
# machine it goes on where it stopped; elsewhere it leaves out what is under experiments/results/runs.
#
#     OUT=out sh experiments/on_gpu.sh PREFIX SECONDS COMMIT
set -eu
prefix=$1 seconds=$2 commit=$3 output=runs/experiments
export PYTHONUNBUFFERED=1
if [ ! -d data/teacher ]; then
    mkdir -p data
    cat carry/part-* > data/carried.tar.xz
    python3 -m tarfile -e data/carried.tar.xz data
    PYTHONPATH=data/gguf-package python3 - <<'END'
from pathlib import Path

from affine_attn.models.convert import convert_folder

gguf = "SmolLM2-135M-Instruct.Q4_1.gguf"
print(*convert_folder("data/gguf", Path("data/teacher-unfinished"), "softmax", gguf_file=gguf), sep="\n")
END
    mv data/teacher-unfinished data/teacher
fi
mkdir -p "$output" "$OUT"
cp -rn experiments/results/runs/. "$output/"
pack() {
    find "$output" -path "$output/$prefix*/result.json" -printf '%P\n' | sed 's,/[^/]*$,,' > data/finished
    tar -czf "$OUT/runs.tar.gz" --exclude model -C "$output" -T data/finished
}
trap pack EXIT
python3 -m experiments run --data data/shards --teacher data/teacher --output "$output" --only "$prefix" \
    --time-limit "$seconds" --commit "$commit"
