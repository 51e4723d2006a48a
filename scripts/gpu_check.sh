#!/usr/bin/env bash
# Everything worth knowing on a GPU, in eight minutes at most, with no network and nothing installed:
#
#   tests       the tests marked gpu
#   sync-debug  a decode loop in which whatever waits for the device raises
#   kernels     what penalties cost, measured beside predicted
#   occupancy   both sides of fix #28500: a delay kernel's forwards, and a real model's
#   asv         the landmark commits, in the environment that is there
#
#   scripts/gpu_check.sh [--out DIR] [--only STEP[,STEP]] [--dry-run]
#
# --out DIR   where JSON and log of each step, asv's results and summary.json go (.cache/gpu-check)
# --only ...  only these steps
# --dry-run   the same steps on the CPU, each as small as it gets
#
# PYTHON names the interpreter; else .venv has it, else python3. ASV_MACHINE names the machine for asv.
# Without git's history .cache/landmarks has the commits: scripts/gpu_landmarks.py extract makes it.
# Prints a table last. Exits with 1 if a step failed.
set -uo pipefail
# With it, cd prints where it went, or goes elsewhere.
unset CDPATH
caller=$PWD
cd "$(dirname "${BASH_SOURCE[0]}")/.." || exit 2

out=.cache/gpu-check
dry=0
all=(tests sync-debug kernels occupancy asv)
only=()
while (($#)); do
  case $1 in
    --out)
      [[ -n ${2:-} ]] || { echo 'gpu_check: --out needs a folder' >&2; exit 2; }
      out=$2
      # Whoever calls means a folder of his own.
      [[ $out == /* ]] || out=$caller/$out
      shift ;;
    --only)
      [[ -n ${2:-} ]] || { echo 'gpu_check: --only needs a step' >&2; exit 2; }
      IFS=, read -ra only <<<"$2"
      shift ;;
    --dry-run) dry=1 ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' scripts/gpu_check.sh; exit 0 ;;
    *) echo "gpu_check: unknown option $1" >&2; exit 2 ;;
  esac
  shift
done
for name in ${only[@]+"${only[@]}"}; do
  [[ " ${all[*]} " == *" $name "* ]] ||
    { echo "gpu_check: no step '$name', there are ${all[*]}" >&2; exit 2; }
done

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
elif [[ $PYTHON == */* && $PYTHON != /* ]]; then
  PYTHON=$caller/$PYTHON
fi
# Where the package is not installed, it is found all the same.
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
mkdir -p "$out" || exit 2
out=$(cd "$out" && pwd) || exit 2
# What an earlier call left would stand in the table of this one.
for name in "${all[@]}"; do rm -f "$out/$name.json" "$out/$name.log" "$out/$name-found.json"; done
rm -f "$out/tests.xml" "$out/summary.json"

device=cuda
# Limits in seconds; with what a step has to end in, the look for a GPU and the table, 480 in all. Two steps
# of several parts end by themselves before that.
tests=130 sync_debug=40 kernels=66 occupancy=82 asv=98
grace=5 probe=20 table=15
home=(env)
sync_options=(--steps 32)
cells=(--device cuda --cells 'b(8|64)-v128256' --seconds 0.4)
sides=(--seconds 72)
marks=(--seconds 88 --rounds 1 --processes 1)
if ((dry)); then
  device=cpu
  # Nothing is fast here, and nothing is at stake.
  tests=240 sync_debug=240 kernels=240 occupancy=240 asv=240 probe=60 table=60
  # A machine that is none is nothing to tell asv of for good.
  mkdir -p "$out/home" || exit 2
  home=(env "HOME=$out/home" "ASV_MACHINE=dry-run")
  sync_options=(--steps 2)
  cells=(--device cpu --cells '^(plain|tree|join)-b8-v32000-s256$' --seconds 0.2 --threads 1)
  sides=(--seconds 230 --cases overlap/chain-b8-t5ms
    --model-options '--model tiny --batch-size 2 --output-len 8 --rounds 1')
  marks=(--seconds 230 --rounds 1 --processes 1 --most 1 --bench '^penalties\.Penalties\.')
fi
timeout --kill-after=2 "$probe" \
  "$PYTHON" -c 'import sys, torch; sys.exit(0 if torch.cuda.is_available() else 3)'
status=$?
if ((status != 0 && status != 3)); then
  echo "gpu_check: '$PYTHON' (PYTHON) cannot import torch; name an interpreter that can" >&2
  exit 2
elif ((status == 3 && !dry)); then
  echo 'gpu_check: torch sees no CUDA device; --dry-run runs the steps on the CPU' >&2
  exit 2
fi

failed=0

step() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 started=$SECONDS status
  shift 2
  [[ ${#only[@]} -eq 0 || " ${only[*]} " == *" $name "* ]] || return 0
  printf '\n== %s (at most %d s)\n' "$name" "$limit"
  # Interrupted, and not ended, a step still writes what it has found so far.
  timeout --signal=INT --kill-after="$grace" "$limit" "$@" 2>&1 | tee "$out/$name.log"
  status=${PIPESTATUS[0]}
  ((status)) && failed=1
  printf '{"step": "%s", "device": "%s", "status": %d, "seconds": %d}\n' \
    "$name" "$device" "$status" $((SECONDS - started)) >"$out/$name.json"
}

laboratory=(env "PYTHONPATH=$PYTHONPATH:$PWD/benchmark" "$PYTHON")

# On a machine without a GPU these are skipped, each with its reason. That nothing was collected is 5.
step tests "$tests" "$PYTHON" -m pytest test/srt test/benchmark/test_dense_one_pass.py \
  test/benchmark/test_transfer_ledger.py test/benchmark/test_modelled_accelerator.py \
  -m 'gpu and not slow' -q -p no:cacheprovider --junitxml="$out/tests.xml"
step sync-debug "$sync_debug" "${laboratory[@]}" -m lab.sync_debug "${sync_options[@]}" \
  --device "$device" --json "$out/sync-debug-found.json"
step kernels "$kernels" "$PYTHON" benchmark/micro/penalties.py "${cells[@]}" \
  --json "$out/kernels-found.json"
step occupancy "$occupancy" "$PYTHON" scripts/gpu_landmarks.py occupancy "${sides[@]}" \
  --device "$device" --json "$out/occupancy-found.json"
step asv "$asv" "${home[@]}" "$PYTHON" scripts/gpu_landmarks.py asv "${marks[@]}" \
  --device "$device" --results "$out/asv" --json "$out/asv-found.json"

printf '\n'
timeout --kill-after=2 "$table" "$PYTHON" scripts/gpu_summary.py "$out" || failed=1
exit "$failed"
