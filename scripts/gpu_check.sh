#!/usr/bin/env bash
# What has to be seen on a GPU: the tests marked gpu, and what penalties cost there. Eight minutes at most.
#
#   scripts/gpu_check.sh [--out DIR] [--dry-run]
#
# --out DIR   where the JSON and the log of each step go (.cache/gpu-check)
# --dry-run   the same steps on the CPU, the bench with a few cells only
#
# PYTHON names the interpreter; else .venv has it, else python3. Exits with 1 if a step failed.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

out=.cache/gpu-check
dry=0
while (($#)); do
  case $1 in
    --out) [[ -n ${2:-} ]] || { echo 'gpu_check: --out needs a folder' >&2; exit 2; }; out=$2; shift ;;
    --dry-run) dry=1 ;;
    -h | --help) sed -n '2,9s/^# \{0,1\}//p' "$0"; exit 0 ;;
    *) echo "gpu_check: unknown option $1" >&2; exit 2 ;;
  esac
  shift
done

if [[ -z ${PYTHON:-} ]]; then
  PYTHON=python3
  [[ -x .venv/bin/python ]] && PYTHON=.venv/bin/python
fi
# Where the package is not installed, it is found all the same.
export PYTHONPATH="$PWD/python${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1
mkdir -p "$out" || exit 2

device=cuda
bench=(--device cuda)
if ((dry)); then
  device=cpu
  bench=(--device cpu --quick)
elif ! "$PYTHON" -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
  echo 'gpu_check: torch sees no CUDA device; --dry-run runs the steps on the CPU' >&2
  exit 2
fi

failed=0
summary=()

step() { # NAME SECONDS COMMAND...
  local name=$1 limit=$2 started=$SECONDS status word=passed
  shift 2
  printf '\n== %s (at most %d s)\n' "$name" "$limit"
  # Interrupted, and not ended, a step still writes what it has found so far.
  timeout --signal=INT --kill-after=10 "$limit" "$@" 2>&1 | tee "$out/$name.log"
  status=${PIPESTATUS[0]}
  if ((status == 124 || status == 137)); then word='timed out'; elif ((status)); then word=FAILED; fi
  ((status)) && failed=1
  printf '{"step": "%s", "device": "%s", "status": %d, "seconds": %d}\n' \
    "$name" "$device" "$status" $((SECONDS - started)) >"$out/$name.json"
  summary+=("$(printf '%-10s %-10s %4d s' "$name" "$word" $((SECONDS - started)))")
}

# On a machine without a GPU these are skipped, each with its reason. That nothing was collected is 5.
step tests 180 "$PYTHON" -m pytest test/srt test/benchmark/test_dense_one_pass.py -m 'gpu and not slow' -q \
  -p no:cacheprovider --junitxml="$out/tests.xml"
step penalties 270 "$PYTHON" benchmark/micro/penalties.py "${bench[@]}" --json "$out/penalties-cells.json"

printf '\n== gpu_check on %s, results in %s\n' "$device" "$out"
printf '  %s\n' "${summary[@]}"
exit "$failed"
