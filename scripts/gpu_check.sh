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
# PYTHON names the interpreter; else .venv has it, else python3. Steps want triton, numpy, safetensors,
# tokenizers, numba, rich, pytest, pytest-timeout and hypothesis besides torch: what is missing is named, and
# fails those that want it. With asv, too, the commits are measured by that. ASV_MACHINE names the machine for
# asv, which is then told of it; else it is not, for good.
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
# A machine that has no name is nothing to tell asv of for good: then its file of machines lies elsewhere, and
# what Triton has compiled for the other steps stays where it is.
elsewhere=(env "HOME=$out/home" "TRITON_CACHE_DIR=${TRITON_CACHE_DIR:-${HOME:-}/.triton/cache}")
home=(env)
[[ -n ${ASV_MACHINE:-} ]] || home=("${elsewhere[@]}" ASV_MACHINE=gpu-check)
sync_options=(--steps 32)
cells=(--device cuda --cells 'b(8|64)-v128256' --seconds 0.4)
sides=(--seconds 72)
marks=(--seconds 88 --rounds 1 --processes 1)
if ((dry)); then
  device=cpu
  # Nothing is fast here, and nothing is at stake.
  tests=240 sync_debug=240 kernels=240 occupancy=240 asv=240 probe=60 table=60
  home=("${elsewhere[@]}" ASV_MACHINE=dry-run)
  sync_options=(--steps 2)
  cells=(--device cpu --cells '^(plain|tree|join)-b8-v32000-s256$' --seconds 0.2 --threads 1)
  sides=(--seconds 230 --cases overlap/chain-b8-t5ms
    --model-options '--model tiny --batch-size 2 --output-len 8 --rounds 1')
  marks=(--seconds 230 --rounds 1 --processes 1 --most 1 --bench '^penalties\.Penalties\.')
fi
mkdir -p "$out/home" || exit 2

# Whatever ends this ends what it has started. A step is interrupted, and not ended, so that it still writes
# what it has found so far; timeout hands the signal on, and kills what does not go.
running=''
# While a step runs, standard error is its log.
exec {errors}>&2
# shellcheck disable=SC2317  # the traps call it
end() { # SIGNAL
  trap '' INT TERM HUP
  if [[ -n $running ]]; then
    kill -INT "$running" 2>/dev/null
    wait "$running"
  fi
  echo 'gpu_check: interrupted' >&"$errors"
  exit $((128 + $1))
}
trap 'end 1' HUP
trap 'end 2' INT
trap 'end 15' TERM

bounded() { # SECONDS GRACE COMMAND...
  local limit=$1 grace=$2
  shift 2
  # Only a command in the background can be left for a signal.
  timeout --signal=INT --kill-after="$grace" "$limit" "$@" &
  running=$!
  wait "$running"
  local status=$?
  running=''
  return "$status"
}

bounded "$probe" 2 "$PYTHON" -c '
import importlib.util, sys
import torch
wanted = "triton numpy safetensors tokenizers numba rich pytest pytest_timeout hypothesis".split()
missing = [name for name in wanted if importlib.util.find_spec(name) is None]
if missing:
    print("gpu_check:", sys.executable, "(PYTHON) lacks", ", ".join(missing), file=sys.stderr)
sys.exit(0 if torch.cuda.is_available() else 3)'
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
  local name=$1 limit=$2 started=$SECONDS status log tee
  shift 2
  [[ ${#only[@]} -eq 0 || " ${only[*]} " == *" $name "* ]] || return 0
  printf '\n== %s (at most %d s)\n' "$name" "$limit"
  # What an interrupted step still says is shown, too.
  exec {log}> >(trap '' INT TERM HUP; exec tee "$out/$name.log")
  tee=$!
  bounded "$limit" "$grace" "$@" >&"$log" 2>&1
  status=$?
  exec {log}>&-
  wait "$tee"
  ((status)) && failed=1
  printf '{"step": "%s", "device": "%s", "status": %d, "seconds": %d, "limit": %d}\n' \
    "$name" "$device" "$status" $((SECONDS - started)) "$limit" >"$out/$name.json"
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
bounded "$table" 2 "$PYTHON" scripts/gpu_summary.py "$out" || failed=1
exit "$failed"
