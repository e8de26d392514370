#!/usr/bin/env bash
# Builds the project on a GPU host without network and runs what needs a GPU; raw results go to the folder $1.
#   benchmarks/on_gpu_host.sh OUT PART...
#
# The suite, and the memory layer alone (seconds on an H200 in brackets; those marked ~ are estimates):
#   tests [560]  or its halves tests_1, tests_2;  vault_tests [~150] belongs to it;  sanitizer [240]
#   bench [100]  small [60]  beside [120]  decoder [100]  compressed [280]  codec [200]  host_memory [120]  prepare [90]
#   peers [500]  needs .gpu/peers.tar.xz (benchmarks/peers_bundle.py)
#   vault [~300]  vault_small [~80]  vault_kills [~100]  checkpoints [~120]  level_3 [~100]
#   saver [~420]  saver_30 [~150]  saver_tests [~240]
# With vLLM, from .gpu/1/*.tar.xz and .gpu/2/*.tar.xz, unless it is installed:
#   serve [240]  serve_vault [~180]  switching [540]  switching_fp8 [300]  switching_vault [~200]  models [~360]
#   vault_servers [~70]  scenarios [300]  two_gpus [400]  ranks [~400, two GPUs; with Ray from .gpu/3/*.tar.xz, if it is there]
#
# What is in .gpu may come in several calls to one machine: each call unpacks what it finds, once. Other things in .gpu:
# switching.json, to which both parts of that benchmark add; checkpoint.safetensors, real weights for `compressed` and
# `codec`; base.tar.gz, an earlier commit for `beside`; saver/, the `test` folder of torch_memory_saver's repository and its
# wheel, for the parts of that name.
#
# Runs of the suite leave their output in OUT/tests*.txt, with the commit that $COMMIT names (a copy of the tree does not
# know it), measurements their raw JSON, and all logs are in OUT/logs.tar.gz. A call of a lent machine may be short: $LIMIT_S
# are the seconds that it has (580). Parts that do not fit any more say so; a part that fails loses none of the others.
# $VAULT_OPTIONS and $MODELS_OPTIONS are passed on to these parts, $ONLY names some scenarios of `ranks`.
set -uo pipefail
out=$1
shift
site=${SITE:-/tmp/site}
vllm_site=${site}_of_vllm # a folder of its own: the suite tests more where it finds vLLM's packages
mkdir -p "$out/logs" "$site" "$vllm_site"
plain_path=$site:$PWD/benchmarks
export PYTHONPATH=$plain_path PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
# Once for each state of the sources.
sources=$(find csrc cumem_sleep setup.py pyproject.toml -type f ! -name '*.pyc' -print0 | sort -z | xargs -0 sha256sum | sha256sum)
built=$site/.built-${sources:0:16}
if [ ! -f "$built" ]; then
    python3 -m pip install --no-build-isolation --no-deps -q --upgrade --target "$site" . || exit 1
    touch "$built"
fi
echo "== built after ${SECONDS} s"
status=0

# Few files come back from such a host.
# shellcheck disable=SC2329 # the trap calls it
pack_logs() {
    find "$out" -maxdepth 1 -name '*.log' -exec mv -t "$out/logs" {} + 2>/dev/null
    tar czf "$out/logs.tar.gz" -C "$out" logs && rm -rf "$out/logs"
}
trap pack_logs EXIT

# Seconds that are left of this call, for a part that takes at most so many.
left() {
    local rest=$((${LIMIT_S:-580} - SECONDS - 10))
    echo $((rest < $1 ? rest : $1))
}

# Runs a measurement for at most so many seconds; it ends what it has started when it is told to.
limited() {
    local seconds
    seconds=$(left "$1")
    shift
    if [ "$seconds" -lt 30 ]; then
        echo "NOT RUN, too little time is left: $*"
        return 1
    fi
    timeout -k 30 "$seconds" "$@"
}

unpack() {
    local archive mark
    for archive in .gpu/[123]/*.tar.xz; do
        mark=$vllm_site/.unpacked-$(basename "$archive")
        if [ -f "$archive" ] && [ ! -f "$mark" ]; then
            if ! tar xJf "$archive" -C "$vllm_site"; then return 1; fi
            touch "$mark"
        fi
    done
}
unpack || status=1
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
    local -x PYTHONPATH=$plain_path
    shift
    {
        echo "commit ${COMMIT:?names the commit under test}, $(date -u +%F)"
        nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
        python3 -c 'import platform, torch, triton; print("Python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__)'
        echo "CUMEM_SLEEP_TEST_DRIVER=cuda python3 -m pytest -q -m \"\" $*"
        CUMEM_SLEEP_TEST_DRIVER=cuda timeout -k 5 $((${LIMIT_S:-580} - SECONDS)) python3 -m pytest -q -m "" -p no:cacheprovider --durations=8 "$@" 2>&1
    } | tee "$out/$name.txt"
}

# For all parts that follow, too.
with_vllm() {
    export HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0
    PYTHONPATH=$plain_path:$vllm_site python3 -c 'import importlib.metadata as m, importlib.util as u; assert u.find_spec("fastapi"), "vLLM is not complete"; m.version("vllm")' || return 1
    export PYTHONPATH=$plain_path:$vllm_site
}

# torch_memory_saver 0.0.10 in a folder of its own: this layer has a package of that name, too.
theirs=${site}_of_torch_memory_saver
with_saver() {
    local wheel
    for wheel in .gpu/saver/*.whl; do
        [ -d "$theirs" ] || python3 -m pip install -q --no-index --no-deps --target "$theirs" "$wheel" || return 1
    done
}

# Its own tests, unchanged, on this layer; those that look into its C library cannot pass (docs/torch-memory-saver.md).
saver_tests() {
    local shim
    shim=$(PYTHONPATH=$site python3 -m cumem_sleep shim torch_memory_saver) || return 1
    {
        echo "commit ${COMMIT:?names the commit under test}, $(date -u +%F), torch_memory_saver's test folder, with $shim first"
        nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
        PYTHONPATH=$shim:$site timeout -k 5 "$(left 240)" python3 -m pytest -v -p no:cacheprovider --timeout=60 --tb=short \
            .gpu/saver/test/test_examples.py .gpu/saver/test/test_configure_subprocess.py 2>&1
    } | tee "$out/saver_tests.txt"
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
    vault)
        with_vllm || echo "vLLM's own layer is not measured"
        # shellcheck disable=SC2086 # several words
        limited 420 python3 benchmarks/vault.py --out "$out/vault.json" --deadline "$(left 400)" ${VAULT_OPTIONS:-}
        ;;
    vault_small) limited 150 python3 benchmarks/vault.py --out "$out/vault_small.json" --scale 8 --deadline "$(left 140)" ;;
    vault_kills) limited 240 python3 benchmarks/vault_kills.py --out "$out/vault_kills.json" --deadline "$(left 220)" ;;
    checkpoints) limited 240 python3 benchmarks/checkpoint_behaviour.py --out "$out/checkpoint_behaviour.json" ;;
    level_3) limited 200 python3 -m cumem_sleep bench --level 3 --weights 30GiB --kv 30GiB --json >"$out/bench_level_3.json" ;;
    saver)
        with_saver && limited 570 python3 benchmarks/torch_memory_saver_beside.py --out "$out/saver.json" --theirs "$theirs" \
            --deadline "$(left 550)"
        ;;
    saver_30)
        with_saver && limited 240 python3 benchmarks/torch_memory_saver_beside.py --out "$out/saver_30.json" --theirs "$theirs" \
            --gib 30 --deadline "$(left 220)"
        ;;
    saver_tests) saver_tests ;;
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
        if [ -f .gpu/peers.tar.xz ]; then tar xJf .gpu/peers.tar.xz -C "$site" || exit 1; fi
        timeout -k 10 580 python3 -m pytest -p no:cacheprovider benchmarks/test_peers.py --deadline=450 \
            --benchmark-json="$out/peers.json" 2>&1 | tee "$out/peers.txt"
        ;;
    scenarios) with_vllm && timeout 400 python3 benchmarks/vllm_scenarios.py --out "$out/vllm_scenarios.json" --jobs 6 ;;
    two_gpus)
        with_vllm && timeout 540 python3 benchmarks/vllm_scenarios.py --out "$out/vllm_scenarios.json" \
            --only model_8b,model_32b,tensor_parallel_2 --jobs 2
        ;;
    ranks)
        with_vllm && limited 560 python3 benchmarks/vllm_scenarios.py --out "$out/vllm_scenarios.json" --gpus 2 --jobs 6 \
            --limit "${SCENARIO_LIMIT_S:-150}" ${ONLY:+--only "$ONLY"}
        ;;
    vault_servers)
        with_vllm && limited 200 python3 benchmarks/vllm_scenarios.py --out "$out/vllm_scenarios.json" \
            --only two_servers_through_the_vault --limit 150
        ;;
    serve) with_vllm && limited 570 python3 benchmarks/vllm_serve.py --out "$out/vllm_serve.json" --deadline "$(left 550)" ;;
    serve_vault)
        with_vllm && limited 300 python3 benchmarks/vllm_serve.py --out "$out/vllm_serve.json" --ways vault,vault_compressed \
            --deadline "$(left 290)"
        ;;
    models)
        # shellcheck disable=SC2086 # several words
        with_vllm && limited 570 python3 benchmarks/serve_models.py --out "$out/serve_models.json" --deadline "$(left 540)" \
            ${MODELS_OPTIONS:-}
        ;;
    switching_vault)
        with_vllm && limited 300 python3 benchmarks/switching.py --out "$out/switching_vault.json" --load-format dummy \
            --ways level1-unprepared,vault --deadline "$(left 280)"
        ;;
    switching) switching ;;
    switching_fp8) switching --fp8 --ways vllm,level1 ;;
    *) echo "unknown: $what" && false ;;
    esac || status=1
done
exit $status
