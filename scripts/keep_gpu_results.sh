#!/usr/bin/env bash
# Take what are results out of a folder, and push them to a branch that holds results alone.
#
#   scripts/keep_gpu_results.sh INCOMING REPOSITORY BRANCH
#
# TOKEN, if set, is what git pushes with; it stands in no argument and in no file. SOURCE is the commit
# whose workflow this is. gpu_results.py says what is taken; if it refuses, nothing is pushed.
set -euo pipefail
# With it, cd prints where it went, or goes elsewhere.
unset CDPATH

if (($# != 3)); then
  sed -n '4p' "$0" >&2
  exit 2
fi
incoming=$(cd "$1" && pwd)
repository=$2 branch=$3
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

export GIT_TERMINAL_PROMPT=0
settings=(
  -c 'user.name=github-actions[bot]'
  -c 'user.email=41898282+github-actions[bot]@users.noreply.github.com'
  -c commit.gpgsign=false
  -c credential.helper=
)
if [[ -n ${TOKEN:-} ]]; then
  # The shell that git starts reads the variable.
  # shellcheck disable=SC2016
  settings+=(-c 'credential.helper=!f() { [ "$1" = get ] && printf "username=x-access-token\npassword=%s\n" "$TOKEN"; }; f')
  export TOKEN
fi

# Commit that the branch is at; nothing if there is no such branch.
tip() {
  local line
  line=$(git "${settings[@]}" ls-remote --heads origin "refs/heads/$branch") || return 1
  printf '%s' "${line%%[[:space:]]*}"
}

# In an empty folder. 1 if somebody else pushed meanwhile; what cannot be mended by another try ends it all.
keep() {
  git init --quiet --initial-branch "$branch" || exit 1
  git remote add origin "$repository" || exit 1
  local before='' now
  now=$(tip) || exit 1
  if [[ -n $now ]]; then
    git "${settings[@]}" fetch --quiet --depth 1 origin "refs/heads/$branch" || exit 1
    git reset --quiet --hard FETCH_HEAD || exit 1
    before=$(git rev-parse HEAD) || exit 1
  fi
  mkdir -p results
  python3 -I "$here/gpu_results.py" accept "$incoming" results >accepted || exit 1
  git add results || exit 1
  if git diff --cached --quiet; then
    echo 'these results are there already'
    return 0
  fi
  git "${settings[@]}" commit --quiet --message "Results of $(head -n 1 accepted | cut -d / -f 1)" \
    --message "Measured by ${SOURCE:-hand}: $(wc -l <accepted) files" || exit 1
  if ! git "${settings[@]}" push --quiet origin "HEAD:refs/heads/$branch"; then
    # Git has said why. Only a branch that has moved is a reason to begin anew.
    now=$(tip) || exit 1
    [[ $now != "$before" ]] || { echo 'the push failed, and nobody else has pushed' >&2; exit 1; }
    return 1
  fi
  cat accepted
}

for attempt in 1 2 3; do
  mkdir "$scratch/$attempt"
  cd "$scratch/$attempt"
  if keep; then exit 0; fi
  echo "the branch has moved meanwhile (attempt $attempt)" >&2
done
exit 1
