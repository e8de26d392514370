#!/usr/bin/env bash
# Builds the project on a GPU host without network and runs what needs a GPU; raw results go to the folder $1.
#   benchmarks/on_gpu_host.sh OUT [tests|tests_1|tests_2] [vault_tests] [sanitizer] [decoder] [bench] [compressed] [codec] [small] [prepare]
#       [beside] [vault] [host_memory] [peers] [switching] [switching_fp8] [scenarios] [two_gpus] [serve]
# What `peers` compares with comes from .gpu/peers.tar.xz (benchmarks/peers_bundle.py), if it is there; vLLM for
# the last five from .gpu/1/*.tar.xz and .gpu/2/*.tar.xz, unless it is installed. Both parts of that benchmark add to one file,
# which begins as .gpu/switching.json if that is there.
# Real weights for `compressed` and `codec` are those of .gpu/checkpoint.safetensors, if it is there.
# Runs of the suite leave their output in OUT/tests*.txt, with the commit that $COMMIT names (a copy of the tree does not
# know it), measurements their raw JSON. A call of a lent machine may be short: $LIMIT_S are the seconds that it has (580).
# `tests` is the suite in under ten minutes, `tests_1` and `tests_2` are its halves; `vault_tests` belongs to it.
set -uo pipefail
out=$1
shift
mkdir -p "$out"
export PYTHONPATH=/tmp/site:$PWD/benchmarks PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
python3 -m pip install --no-build-isolation --no-deps -q --upgrade --target /tmp/site . || exit 1
status=0
checkpoint=()
if [ -f .gpu/checkpoint.safetensors ]; then checkpoint=(--checkpoint .gpu/checkpoint.safetensors); fi

# What mostly starts processes of its own: about half of the suite's time.
in_processes=(tests/gpu tests/tools/test_bench.py tests/tools/test_cli.py tests/tools/test_doctor.py tests/test_process.py)

# What starts vaults, each with a context of its own.
with_vaults=(tests/vault tests/backups/test_tiers.py)
# Speaks HTTP and reaches no GPU, with packages that such a host may lack.
without_gpu=(tests/serve)

suite() {
    local name=$1
    shift
    {
        echo "commit ${COMMIT:?names the commit under test}, $(date -u +%F)"
        nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
        python3 -c 'import platform, torch, triton; print("Python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__)'
        echo "CUMEM_SLEEP_TEST_DRIVER=cuda python3 -m pytest -q -m \"\" $*"
        CUMEM_SLEEP_TEST_DRIVER=cuda timeout -k 5 $((${LIMIT_S:-580} - SECONDS)) python3 -m pytest -q -m "" -p no:cacheprovider --durations=8 "$@" 2>&1
    } | tee "$out/$name.txt"
}

with_vllm() {
    local archive
    export HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0
    if ! python3 -c 'import importlib.metadata; importlib.metadata.version("vllm")' 2>/dev/null; then
        for archive in .gpu/1/*.tar.xz .gpu/2/*.tar.xz; do
            [ ! -f "$archive" ] || tar xJf "$archive" -C /tmp/site || return 1
        done
    fi
}

# The rest of ten minutes; what is not measured by then keeps what it has.
switching() {
    with_vllm || return 1
    mkdir -p /tmp/switching
    if [ -f .gpu/switching.json ] && [ ! -f /tmp/switching/switching.json ]; then
        cp .gpu/switching.json /tmp/switching/ || return 1
    fi
    timeout -k 40 $((580 - SECONDS)) python3 benchmarks/switching.py --out /tmp/switching/switching.json \
        --deadline $((545 - SECONDS)) "$@"
    local result=$?
    cp /tmp/switching/switching.* "$out" && return "$result"
}

for what in "$@"; do
    echo "== $what"
    case $what in
    tests) suite tests "${with_vaults[@]/#/--ignore=}" "${without_gpu[@]/#/--ignore=}" ;;
    vault_tests) suite vault_tests "${with_vaults[@]}" ;;
    tests_1) suite tests_1 "${in_processes[@]}" ;;
    tests_2) suite tests_2 "${in_processes[@]/#/--ignore=}" "${with_vaults[@]/#/--ignore=}" "${without_gpu[@]/#/--ignore=}" ;;
    sanitizer)
        # Errors of API calls are not its business here: the suite provokes them on purpose and checks them. Left out is
        # what measures time or fills the GPU, and what needs PyTorch or CuPy to give memory up, which they do not do
        # under the sanitizer (PyTorch 2.11 keeps a deleted graph's hold on its pool: use_count() stays 2).
        of_the_allocator=(tests/test_allocator.py tests/backups/test_clean.py tests/operations/test_{devices,levels,sleep_bytes}.py)
        CUMEM_SLEEP_TEST_DRIVER=cuda timeout 240 compute-sanitizer --tool memcheck --report-api-errors no \
            --error-exitcode 9 python3 -m pytest -q -p no:cacheprovider --timeout=200 -m "" "${of_the_allocator[@]}" tests/gpu/test_torch.py \
            -k "not 200_cycles and not in_flight and not without_room and not captured_in_its_pool and not cupy" 2>&1 | tee "$out/sanitizer.txt"
        ;;
    decoder) timeout 200 python3 benchmarks/decoder.py --out "$out/decoder.json" --checkpoint /tmp/qwen3-8b ;;
    bench) timeout 280 python3 -m cumem_sleep bench --weights 62488MiB --kv 54.63GiB --json >"$out/bench.json" ;;
    beside)
        # Today's bench and that of .gpu/base.tar.gz (`git archive` of an earlier commit), in turns: one machine, one hour.
        mkdir -p /tmp/base && tar xzf .gpu/base.tar.gz -C /tmp/base || exit 1
        (cd /tmp/base && python3 -m pip install --no-build-isolation --no-deps -q --upgrade --target /tmp/base_site .) || exit 1
        for turn in 1 2; do
            for site in base_site site; do
                PYTHONPATH=/tmp/$site timeout 60 python3 -m cumem_sleep bench --rounds 1 --weights 16GiB --kv 12GiB \
                    --json >"$out/bench_$site.$turn.json" || status=1
            done
        done
        ;;
    vault) timeout 120 python3 benchmarks/vault.py --gib 8 --out "$out/vault.json" ;;
    compressed) timeout 280 python3 benchmarks/compressed.py --out "$out/compressed.json" "${checkpoint[@]}" ;;
    codec) timeout 200 python3 benchmarks/codec.py --out "$out/codec.json" "${checkpoint[@]}" ;;
    small)
        timeout 200 python3 -m cumem_sleep bench --weights 8000MiB --segment-size 2MiB --kv 20GiB --json \
            >"$out/bench_small_segments.json"
        ;;
    host_memory) timeout 200 python3 benchmarks/host_memory.py --out "$out/host_memory.json" ;;
    prepare) timeout 200 python3 benchmarks/prepare_cost.py --out "$out/prepare_cost.json" ;;
    peers)
        # After --deadline seconds no process is started that would end later; a minute on, none is left.
        if [ -f .gpu/peers.tar.xz ]; then tar xJf .gpu/peers.tar.xz -C /tmp/site || exit 1; fi
        timeout -k 10 580 python3 -m pytest -p no:cacheprovider benchmarks/test_peers.py --deadline=450 \
            --benchmark-json="$out/peers.json" 2>&1 | tee "$out/peers.txt"
        ;;
    scenarios) with_vllm && timeout 400 python3 benchmarks/vllm_scenarios.py --out "$out/vllm_scenarios.json" --jobs 6 ;;
    two_gpus)
        with_vllm && timeout 540 python3 benchmarks/vllm_scenarios.py --out "$out/vllm_scenarios.json" \
            --only model_8b,model_32b,tensor_parallel_2 --jobs 2
        ;;
    serve) with_vllm && timeout 580 python3 benchmarks/vllm_serve.py --out "$out/vllm_serve.json" ;;
    switching) switching ;;
    switching_fp8) switching --fp8 --ways vllm,level1 ;;
    *) echo "unknown: $what" && false ;;
    esac || status=1
done
exit $status
