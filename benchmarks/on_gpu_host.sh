#!/usr/bin/env bash
# Builds the project on a GPU host without network and runs what needs a GPU; raw results go to the folder $1.
#   benchmarks/on_gpu_host.sh OUT PART...
#
# The suite, and the memory layer alone (seconds on an H200 in brackets; those marked ~ are estimates):
#   tests [410]  vault_tests [15] belongs to it;  sanitizer [240]
#   tests_1_of_2+tests_2_of_2 two_gpu_tests [~250]  the same on two GPUs at once; so for any number
#   beside [~300; $BESIDE_WAYS, as own_again]  level_3 [25]
#   level_3_of_ranks [~120, two GPUs; NCCL's library from .gpu/5/nccl.tar.xz, if it is there]
#   vault [~300; with vLLM and .gpu/saver beside, if they are there]  vault_small [~80]
#   links [~240, several GPUs; $LINKS_OPTIONS, as --compress]
#   saver_tests [~240]
# With vLLM, from .gpu/1/*.tar.xz and .gpu/2/*.tar.xz, unless it is installed:
#   serve [~340; $SERVE_OPTIONS, as --ways prepared_graphs,vllm_best]  models [~330; $MODELS_OPTIONS, as --restart-seconds 120]
#   loading [~400; $LOADING_OPTIONS, as --shape 14B]
#   serve_level_3 [~240; $LEVEL_3_OPTIONS, as --deadline 330]
#   serve_level_3_own [~240, at once with it on a second GPU]
#   kept_kv [~280; $KEPT_KV_OPTIONS, as --shape 8B --tokens 16000]  kept_kv_windows [~80]
#   scenarios [300]  ranks [~400, two GPUs]  vllm_level_3_of_ranks [~250, two GPUs, with .gpu/5]
#   upstream [as long as it may; $UPSTREAM_OPTIONS, as --parts cumem --ways cumem_sleep --gpus 4]
#
# With SGLang, from .gpu/4/sglang.tar.xz (gpu_host_archives.py), in a folder of its own:
#   sglang [~240; $SGLANG_OPTIONS, as --shape 0.6B --ways ours-graphs,theirs-graphs]
#
# What is in .gpu may come in several calls to one machine: each call unpacks what it finds, once. Other things in .gpu:
#   base/, a wheel of an earlier commit, for `beside`
#   saver/, the `test` folder of torch_memory_saver's repository and its wheel, for `saver_tests` and `vault`
#   upstream/*.tar.xz, vLLM's folder `tests`, and in `site` what it needs and the host lacks, for `upstream`
#
# Parts joined by + run at the same time, the first on GPU 0, the second on GPU 1; those joined by a comma one after the
# other (`vault+level_3,links`). A wheel in .gpu/wheel/HASH/ is installed instead of a build if it is of these
# sources (the first line printed names HASH).
#
# Runs of the suite leave their output in OUT/tests*.txt, with the commit that $COMMIT names (a copy of the tree does not
# know it), measurements their raw JSON, and all logs are in OUT/logs.tar.gz. A call of a lent machine may be short:
# $LIMIT_S are the seconds that it has (580). Parts that do not fit any more say so; a part that fails loses none of the
# others. $VAULT_OPTIONS and $MODELS_OPTIONS are passed on to these parts, $ONLY names some scenarios of `ranks`, of
# which $SCENARIO_JOBS (3) run at a time: six engines of two processes each took 96 to 137 s on 32 cores.
set -uo pipefail
out=$1
shift
site=${SITE:-/tmp/site}
vllm_site=${site}_of_vllm # a folder of its own: the suite tests more where it finds vLLM's packages
mkdir -p "$out/logs" "$site" "$vllm_site"
plain_path=$site:$PWD/benchmarks
export PYTHONPATH=$plain_path PYTHONSAFEPATH=1 PYTHONUNBUFFERED=1
# Some hosts forbid writing bytecode: then every process would compile what it imports anew.
unset PYTHONDONTWRITEBYTECODE
export PYTHONPYCACHEPREFIX=${PYTHONPYCACHEPREFIX:-/tmp/pycache}
# Once for each state of the sources.
sources=$(find csrc cumem_sleep setup.py pyproject.toml -type f ! -name '*.pyc' ! -name '*.so' -print0 | LC_ALL=C sort -z |
    xargs -0 sha256sum | sha256sum | cut -c 1-16)
echo "== sources $sources"
built=$site/.built-$sources
if [ ! -f "$built" ]; then
    carried=$(find ".gpu/wheel/$sources" -name '*.whl' 2>/dev/null | head -n 1)
    python3 -m pip install --no-build-isolation --no-deps -q --upgrade --target "$site" "${carried:-.}" || exit 1
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

# measure SECONDS SCRIPT RESULT [OPTION...]: a script's raw result, after at most so many seconds.
measure() {
    local seconds=$1 script=$2 result=$3
    shift 3
    limited "$seconds" python3 "benchmarks/$script.py" --out "$out/$result.json" "$@"
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

# What starts vaults, each with a context of its own.
with_vaults=(tests/vault tests/backups/test_tiers.py)
# What skips itself on one GPU.
of_two_gpus=(
    tests/operations/test_devices.py
    tests/gpu/test_torch.py::test_peers_keep_their_access
)
# Speaks HTTP and reaches no GPU, with packages that such a host may lack.
without_gpu=(tests/serve tests/ray tests/frameworks tests/vllm/test_serve_{without_layer,kept_kv}.py)

suite() {
    local name=$1 begun before rest result crashed=0
    local -x PYTHONPATH=$plain_path
    shift
    begun=$(mktemp)
    {
        echo "commit ${COMMIT:?names the commit under test}, $(date -u +%F)"
        nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
        python3 -c 'import platform, torch, triton; print("Python", platform.python_version(), "torch", torch.__version__, "triton", triton.__version__)'
        echo "CUMEM_SLEEP_TEST_DRIVER=cuda python3 -m pytest -q -m \"\" $*"
        # A test that crashes Python must not cost those behind it: a machine may not come twice.
        while true; do
            rest=$((${LIMIT_S:-580} - SECONDS)) # timeout takes 0 for no limit
            if [ "$rest" -le 0 ]; then
                echo "NOT RUN, no time is left"
                result=124
                break
            fi
            before=$(wc -l <"$begun")
            # Like Ctrl-C, so that pytest still says what has failed, and where it was.
            CUMEM_SLEEP_TEST_DRIVER=cuda CUMEM_SLEEP_TEST_BEGUN=$begun timeout -s INT -k 8 "$rest" \
                python3 -m pytest -q -m "" -p no:cacheprovider --durations=8 "$@" 2>&1
            result=$?
            # timeout answers 137 if it had to kill it.
            if [ "$result" -le 128 ] || [ "$result" = 137 ] || [ "$(wc -l <"$begun")" = "$before" ]; then break; fi
            crashed=1
            echo "ENDED BY SIGNAL $((result - 128)) in $(tail -n 1 "$begun"). What follows it:"
        done
        rm "$begun"
        [ "$result" = 0 ] && [ "$crashed" = 0 ]
    } | tee "$out/$name.txt"
}

# For all parts that follow, too.
with_vllm() {
    export HF_HUB_OFFLINE=1 VLLM_USE_FLASHINFER_SAMPLER=0
    PYTHONPATH=$plain_path:$vllm_site python3 -c 'import importlib.metadata as m, importlib.util as u
assert u.find_spec("fastapi"), "vLLM is not complete"
m.version("vllm")' || return 1
    export PYTHONPATH=$plain_path:$vllm_site
}

# torch_memory_saver 0.0.10 in a folder of its own: this layer has a package of that name, too.
theirs=${site}_of_torch_memory_saver
with_saver() {
    [ -d "$theirs" ] || python3 -m pip install -q --no-index --no-deps --target "$theirs" .gpu/saver/*.whl
}

# In a subshell: what it exports is for SGLang alone. Its kernels are compiled with nvcc and ninja; torch_memory_saver is
# linked with libcudart, which is to be PyTorch's.
with_sglang() {
    local folder=${site}_of_sglang top runtime
    if [ ! -d "$folder/site" ]; then
        mkdir -p "$folder"
        tar xJf .gpu/4/sglang.tar.xz -C "$folder" || return 1
    fi
    top=$(nvcc --dryrun -c -x cu /dev/null 2>&1 | sed -n 's/^#\$ TOP=//p')
    if [ -n "$top" ]; then CUDA_HOME=$(readlink -f "$top") && export CUDA_HOME; fi
    runtime=$(python3 -c 'import torch
maps = [line.split()[-1] for line in open("/proc/self/maps") if "libcudart.so" in line]
print(maps[0].rpartition("/")[0] if maps else "")')
    PATH=$PATH:$(python3 -c 'import sys; print(sys.prefix)')/bin # ninja
    export PATH PYTHONPATH=$plain_path LD_LIBRARY_PATH=$runtime:$folder/lib${LD_LIBRARY_PATH:+:$LD_LIBRARY_PATH}
    # shellcheck disable=SC2086 # several words
    measure 360 sglang_cycles sglang_cycles --sglang "$folder" --deadline "$(left 320)" ${SGLANG_OPTIONS:-}
}

# Its own tests, unchanged, on this layer; those that look into its C library cannot pass (docs/torch-memory-saver.md).
# Where there are two GPUs, a call of this part alone, not joined by +, runs those of several devices too.
saver_tests() {
    local shim
    shim=$(PYTHONPATH=$site python3 -m cumem_sleep shim torch_memory_saver) || return 1
    {
        echo "commit ${COMMIT:?names the commit under test}, $(date -u +%F)"
        echo "torch_memory_saver's test folder, with $shim first"
        nvidia-smi --query-gpu=name,driver_version --format=csv,noheader
        PYTHONPATH=$shim:$site timeout -k 5 "$(left 240)" python3 -m pytest -v -p no:cacheprovider --timeout=60 --tb=short \
            .gpu/saver/test/test_examples.py .gpu/saver/test/test_configure_subprocess.py 2>&1
    } | tee "$out/saver_tests.txt"
}

# One that can suspend communicators, which PyTorch's is too old for.
newer=/tmp/libnccl.so.2
newer_nccl() {
    [ -f "$newer" ] || { [ -f .gpu/5/nccl.tar.xz ] && tar xJf .gpu/5/nccl.tar.xz -C /tmp; }
}

part() {
    case $1 in
    tests) suite tests "${with_vaults[@]/#/--ignore=}" "${without_gpu[@]/#/--ignore=}" ;;
    vault_tests) suite vault_tests "${with_vaults[@]}" ;;
    two_gpu_tests) suite two_gpu_tests "${of_two_gpus[@]}" ;;
    tests_[0-9]_of_[0-9])
        local share of files
        IFS=_ read -r _ share _ of <<<"$1"
        # pytest ignores nothing that is named.
        mapfile -t files < <(find tests -name 'test_*.py' | LC_ALL=C sort |
            grep -v -f <(printf '^%s\n' "${with_vaults[@]}" "${without_gpu[@]}") | awk "NR % $of == $share % $of")
        suite "$1" "${files[@]}"
        ;;
    sanitizer)
        # Errors of API calls are not its business here: the suite provokes them on purpose and checks them. Left out is
        # what measures time or fills the GPU, and what needs PyTorch or CuPy to give memory up, which they do not do
        # under the sanitizer (PyTorch 2.11 keeps a deleted graph's hold on its pool: use_count() stays 2).
        CUMEM_SLEEP_TEST_DRIVER=cuda timeout 240 compute-sanitizer --tool memcheck --report-api-errors no \
            --error-exitcode 9 python3 -m pytest -q -p no:cacheprovider --timeout=200 -m "" \
            tests/test_allocator.py tests/backups/test_clean.py tests/operations/test_{devices,levels,sleep_bytes}.py \
            tests/gpu/test_torch.py \
            -k "not 200_cycles and not in_flight and not without_room and not captured_in_its_pool and not cupy" 2>&1 |
            tee "$out/sanitizer.txt"
        ;;
    kept_kv | kept_kv_windows)
        local shape=()
        if [ "$1" = kept_kv_windows ]; then shape=(--shape windows --own-rounds 0); fi
        # shellcheck disable=SC2086 # several words
        with_vllm && measure 420 vllm_kept_kv "vllm_$1" --deadline "$(left 170)" ${KEPT_KV_OPTIONS:-} "${shape[@]}"
        ;;
    level_3)
        limited 200 python3 -m cumem_sleep bench --level 3 --weights 30GiB --kv 30GiB --json >"$out/bench_level_3.json"
        ;;
    beside)
        local site failed=0
        # One machine, one hour, memory used before: a 32B model of today's and of an earlier commit, by today's script.
        python3 -m pip install --no-index --no-deps -q --upgrade --target /tmp/base_site .gpu/base/*.whl || return 1
        python3 -c 'import record; record.touch_host_memory(150 << 30)'
        for site in base_site site; do
            PYTHONPATH=/tmp/$site:$PWD/benchmarks measure 200 vault "beside_$site" --deadline "$(left 190)" \
                --ways "${BESIDE_WAYS:-own_again,vault,compressed}" || failed=1
        done
        return "$failed"
        ;;
    vault)
        with_vllm || echo "vLLM's own layer is not measured"
        with_saver || echo "torch_memory_saver is not measured"
        # shellcheck disable=SC2086 # several words
        PYTHONPATH=$PYTHONPATH:$theirs measure 420 vault vault --deadline "$(left 400)" ${VAULT_OPTIONS:-}
        ;;
    vault_small) measure 150 vault vault_small --scale 8 --deadline "$(left 140)" ;;
    links)
        # shellcheck disable=SC2086 # several words
        measure 560 vault_links vault_links --deadline "$(left 540)" ${LINKS_OPTIONS:-}
        ;;
    saver_tests) saver_tests ;;
    sglang) (with_sglang) ;;
    level_3_of_ranks)
        local nccl=()
        if newer_nccl; then nccl=(--nccl "$newer"); fi
        measure 400 checkpoint_ranks checkpoint_ranks "${nccl[@]}"
        ;;
    vllm_level_3_of_ranks)
        newer_nccl && with_vllm && LD_PRELOAD=$newer VLLM_NCCL_SO_PATH=$newer \
            measure 280 vllm_scenarios vllm_level_3_of_ranks --only level_3_of_ranks
        ;;
    scenarios) with_vllm && measure 400 vllm_scenarios vllm_scenarios --jobs 6 ;;
    ranks)
        with_vllm && measure 560 vllm_scenarios vllm_scenarios --gpus 2 --jobs "${SCENARIO_JOBS:-3}" \
            --limit "${SCENARIO_LIMIT_S:-150}" ${ONLY:+--only "$ONLY"}
        ;;
    serve)
        # shellcheck disable=SC2086 # several words
        with_vllm && measure 570 vllm_serve vllm_serve --deadline "$(left 550)" ${SERVE_OPTIONS:-}
        ;;
    serve_level_3 | serve_level_3_own)
        local other=()
        if [ "$1" = serve_level_3_own ]; then
            other=(--ways "own,vault" --cycles 6 --port 8090 --work /tmp/vllm-serve-own)
        fi
        # shellcheck disable=SC2086 # several words
        with_vllm && measure 570 vllm_level_3 "vllm_${1#serve_}" --deadline "$(left 240)" "${other[@]}" \
            ${LEVEL_3_OPTIONS:-}
        ;;
    loading)
        # shellcheck disable=SC2086 # several words
        with_vllm && measure 590 vllm_loading vllm_loading --deadline "$(left 560)" ${LOADING_OPTIONS:-}
        ;;
    models)
        # shellcheck disable=SC2086 # several words
        with_vllm && measure 570 serve_models serve_models --deadline "$(left 540)" ${MODELS_OPTIONS:-}
        ;;
    upstream)
        mkdir -p "${site}_of_upstream"
        tar xJf .gpu/upstream/*.tar.xz -C "${site}_of_upstream" || return 1
        # shellcheck disable=SC2086 # several words
        with_vllm && PYTHONPATH=$PYTHONPATH:${site}_of_upstream/site measure 590 upstream_tests upstream_tests \
            "${site}_of_upstream" --deadline "$(left 560)" ${UPSTREAM_OPTIONS:-}
        ;;
    *) echo "unknown: $what" && false ;;
    esac
}

in_turn() {
    local name names failed=0
    IFS=, read -ra names <<<"$1"
    for name in "${names[@]}"; do
        echo "== $name, after ${SECONDS} s"
        part "$name" || failed=1
    done
    return "$failed"
}

# Each on a GPU of its own; their output follows when all have ended.
at_once() {
    local gpu=0 name running=() failed=0
    for name in "$@"; do
        CUDA_VISIBLE_DEVICES=$gpu in_turn "$name" >"$out/logs/$name.txt" 2>&1 &
        running+=($!)
        gpu=$((gpu + 1))
    done
    for gpu in "${!running[@]}"; do
        wait "${running[$gpu]}" || failed=1
        echo "-- ${*:gpu+1:1}"
        tail -n "${TAIL_LINES:-40}" "$out/logs/${*:gpu+1:1}.txt"
    done
    return "$failed"
}

for what in "$@"; do
    if [[ $what == *+* ]]; then
        IFS=+ read -ra names <<<"$what"
        at_once "${names[@]}" || status=1
    else
        in_turn "$what" || status=1
    fi
done
exit $status
