#!/usr/bin/env bash
# Builds the project on a GPU host without network and runs what needs a GPU; raw results go to the folder $1.
#   benchmarks/on_gpu_host.sh OUT [tests] [sanitizer] [decoder] [copies]
set -uo pipefail
out=$1
shift
mkdir -p "$out"
export PYTHONPATH=/tmp/site:$PWD/benchmarks PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
python3 -m pip install --no-build-isolation --no-deps -q --upgrade --target /tmp/site . || exit 1
status=0
for what in "$@"; do
    echo "== $what"
    case $what in
    tests) CUMEM_SLEEP_TEST_DRIVER=cuda timeout 280 python3 -m pytest -q -p no:cacheprovider tests 2>&1 | tee "$out/tests.txt" ;;
    gpu) CUMEM_SLEEP_TEST_DRIVER=cuda timeout 240 python3 -m pytest -q -p no:cacheprovider tests/gpu 2>&1 | tee "$out/tests.txt" ;;
    decoder) timeout 200 python3 benchmarks/decoder.py --out "$out/decoder.json" --checkpoint /tmp/qwen3-8b ;;
    copies) timeout 200 python3 benchmarks/copies.py --out "$out/copies.json" ;;
    *) echo "unknown: $what" && false ;;
    esac || status=1
done
exit $status
