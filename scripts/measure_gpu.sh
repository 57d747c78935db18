#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# SPDX-FileCopyrightText: Copyright contributors to the DDTree for vLLM project
#
# What docs/measurements.md wants from one GPU, by parts, each within a time limit:
#
#     scripts/measure_gpu.sh PART FOLDER [SECONDS]
#
#   train  a dense and a hybrid pair of 100 M parameters, both at once
#   exact  random load twice for half of SECONDS, the hybrid pair against stock DFlash,
#          repeats of the gated delta kernels, and these under compute-sanitizer
#   speed  tokens per second of both pairs, trees beside chains; wants train
#   step   milliseconds a step at 8B shapes, gated delta and attention kernels, a profile
#
# Results and logs go to FOLDER; a part stops what is unfinished after SECONDS (3600).
# The patched vLLM has to be importable by PYTHON (python3). Exit code 0, 1 if a command
# failed or ran out of time, 2 if an argument is wrong.
set -u
refuse() {
    echo "measure_gpu.sh: $1" >&2
    exit 2
}
[ $# -eq 2 ] || [ $# -eq 3 ] || refuse "give PART FOLDER [SECONDS]"
part=$1 folder=$(realpath -m "$2") limit=${3:-3600}
[[ $part =~ ^(train|exact|speed|step)$ ]] ||
    refuse "PART $part: take train, exact, speed or step"
[[ $limit =~ ^[1-9][0-9]*$ ]] || refuse "SECONDS $limit: give a whole number, 1 or more"
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2
python=${PYTHON:-python3}
mkdir -p "$folder/logs" 2>/dev/null || refuse "FOLDER $2: cannot be made; name another"
export VLLM_USE_V2_MODEL_RUNNER=1 VLLM_USE_FLASHINFER_SAMPLER=0 PYTHONUNBUFFERED=1
export TRITON_CACHE_AUTOTUNING=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
pytest=("$python" -m pytest -q -s -p no:cacheprovider)
SECONDS=0

left() { echo $((limit > SECONDS ? limit - SECONDS : 1)); }

# run NAME COMMAND...: within what is left of the time; says the end of its log.
run() {
    local name=$1 log=$folder/logs/$1.log begin=$SECONDS code=0
    shift
    timeout -k 5 "$(left)" "$@" >"$log" 2>&1 || code=$?
    echo "== $name: code $code after $((SECONDS - begin)) s"
    grep -E "^\||passed|failed|SUMMARY|part from|complete,|repeats|largest" "$log" | tail -n 60
    ((code == 0)) || { tail -n 3 "$log"; echo "$name" >>"$folder/logs/failed-$part"; }
}

train() {
    run "train-$2" "$python" scripts/train_pair.py --preset "$1" --device cuda --force \
        --set vocab_size=1024 --set "gen_sequences=$3" --out "$folder/$2" \
        --target-seconds 100 --drafter-seconds 200
}

sanitize() {
    run "$1" compute-sanitizer --tool "$1" --print-limit 5 "${pytest[@]}" \
        tests/kernels/test_gdn.py -k "$2"
}

speed() {
    run "speed-$1" "$python" scripts/bench.py speed --pair "$folder/$1" \
        --chains 3,7,15 --budgets 7,15,31,63,127 --batches 1,4,16,64 --prompts 16 \
        --tokens 128 --rounds 3 --repeats 1 --max-model-len 1024 --capture-batches \
        --together "$2" --out "$folder/bench-speed-$1.json"
}

step() {
    run "step-$1" "$python" scripts/bench.py step --shape 8b --rows "$1" --batches 1,8 \
        --rounds 3 --repeats 4 --tokens 48 --together 2 --out "$folder/bench-step-$1.json"
}

rm -f "$folder/logs/failed-$part"
case $part in
train)
    train 100m dense 20480 &
    train hybrid-100m hybrid 12288 &
    wait
    ;;
exact)
    for seed in 1 2; do
        DDTREE_TEST_SEED=$seed DDTREE_LOAD_SECONDS=$((limit / 2)) \
            run "load-$seed" "${pytest[@]}" tests/v2/test_load.py &
    done
    {
        run kernels "${pytest[@]}" tests/kernels -k gdn
        run hybrid "${pytest[@]}" tests/v2/test_v2_hybrid.py tests/v2/test_v2_hybrid_load.py
    } &
    {
        sanitize memcheck "dims6 or dims4"
        sanitize racecheck "dims6 and float32"
        sanitize synccheck "dims6 and float32"
    } &
    wait
    run hybrid-pair "${pytest[@]}" tests/v2/test_v2_hybrid_pair.py -k "chain_shaped or 31"
    ;;
speed)
    speed dense 3
    speed hybrid 8
    ;;
step)
    step 16,64
    run gdn "$python" scripts/bench_gdn.py --out "$folder/bench-kernels-gdn.json"
    step 32
    run attention "$python" scripts/bench_kernels.py --only attention \
        --out "$folder/bench-kernels-attention.json"
    run profile "$python" scripts/profile_step.py --shape 8b --rows 64 --batches 1,8 \
        --arms chain,tree --tokens 30 --out "$folder/profile-step.json"
    ;;
esac
[ ! -e "$folder/logs/failed-$part" ]
