#!/usr/bin/env bash
# Make a machine with a GPU a runner of the benchmark workflow: ephemeral, unprivileged, locked down.
# docs/gpu-runner.md goes through it. Run as root. What an earlier call was told of the repository, the
# machine and the release holds until another one is told otherwise.
#
#   scripts/setup_gpu_runner.sh --url URL --name NAME --tarball FILE --sha256 HEX --token-file FILE [OPTIONS]
#
# --url URL          the repository
# --name NAME        what asv calls the machine, for good: gpu-..., lower case
# --tarball FILE     release of the runner, for Linux
# --sha256 HEX       its checksum, from where the release is announced
# --token-file FILE  the registration token is in FILE, or comes by standard input for '-'
# --token-helper FILE  or: a program that prints a fresh token each time; it is copied for root alone
# --python FILE      interpreter with torch, triton and asv, for everybody to run (/opt/gpu-benchmark/bin/python)
# --model DIR        SmolLM2-135M-Instruct, as make model makes it; 'none' for no longer
# --clocks MHZ       lock the GPU's clock at that; 'none' for no longer
# --force            also while a job runs, which is ended
# --dry-run          say what would be done, and do nothing; needs no root
#
# A token never stands on a command line, where every user of the machine could read it.
set -euo pipefail
# With it, cd prints where it went, or goes elsewhere.
unset CDPATH

user=gpu-runner
etc=/etc/gpu-runner             # root's: settings, the token until it is used
lib=/usr/local/lib/gpu-runner   # root's: the release, what prepares a job
state=/var/lib/gpu-runner       # root's too; the job's three folders in it are made anew for each
folders="$state/runner $state/work $state/home"
unit=/etc/systemd/system/gpu-runner.service
clocks_unit=/etc/systemd/system/gpu-clocks.service
labels=gpu-benchmark,ephemeral
remembered=$etc/setup.conf

fail() {
  printf 'setup_gpu_runner: %s\n' "$*" >&2
  exit 2
}

url='' name='' tarball='' sha256='' token_file='' token_helper='' model='' clocks=''
python=/opt/gpu-benchmark/bin/python
dry=0 force=0
if [[ -r $remembered ]]; then
  while IFS='=' read -r option value; do
    case $option in
      url | name | python | model | clocks) printf -v "$option" %s "$value" ;;
    esac
  done <"$remembered"
fi
[[ -r $lib/sha256 ]] && sha256=$(<"$lib/sha256")
while (($#)); do
  case $1 in
    --dry-run) dry=1 ;;
    --force) force=1 ;;
    -h | --help) sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//p}' "$0"; exit 0 ;;
    --token | --token=*) fail 'a token is not given as an argument, others could read it: --token-file' ;;
    --url | --name | --tarball | --sha256 | --token-file | --token-helper | --python | --model | --clocks)
      [[ -n ${2:-} ]] || fail "$1 needs a value"
      option=${1#--}
      printf -v "${option//-/_}" %s "$2"
      shift ;;
    *) fail "unknown option $1" ;;
  esac
  shift
done

[[ $model == none ]] && model=''
[[ $clocks == none ]] && clocks=''

# --- What is given --------------------------------------------------------------------------------

# Each of these goes into a file that something else reads: nothing in it may mean anything there.
check_options() {
  [[ $url =~ ^https://[A-Za-z0-9./_-]+$ ]] || fail "--url must be that of a repository, got '$url'"
  [[ $name =~ ^gpu-[a-z0-9][a-z0-9-]{0,40}$ ]] || fail "--name must be like gpu-h200, got '$name'"
  [[ $sha256 =~ ^[0-9a-f]{64}$ ]] || fail '--sha256 must be 64 hexadecimal digits'
  [[ -z $clocks || $clocks =~ ^[0-9]{3,5}$ ]] || fail "--clocks must be in MHz, got '$clocks'"
  local path
  for path in "$python" "$model"; do
    [[ $path =~ ^(/[A-Za-z0-9._/-]+)?$ ]] || fail "'$path' must be an absolute path without odd characters"
  done
  [[ -n $tarball || (-r $lib/sha256 && $(<"$lib/sha256") == "$sha256") ]] || fail '--tarball is missing'
  [[ -z $token_file || -z $token_helper ]] || fail 'either --token-file or --token-helper'
  [[ -n $token_file || -n $token_helper || -e $etc/token-helper ]] ||
    fail 'a token is missing: --token-file or --token-helper'
}

# Whether a file is root's, and nobody else's to change or to replace: the file, each link that leads to it
# and each folder above those. Says what is not.
is_roots() { # PATH
  local path=$1 above folder links=0
  while :; do
    folder=$(cd -P -- "$(dirname -- "$path")" && pwd) || { printf '%s' "$path"; return 1; }
    # As it is, and as it was called: a link on the way stands in a folder, too.
    for above in "$folder" "$(dirname -- "$path")"; do
      while :; do
        [[ $(find -H "$above" -maxdepth 0 -type d -user root ! -perm /022) ]] ||
          { printf '%s' "$above"; return 1; }
        [[ $above == */*[!/]* ]] || break
        above=$(dirname -- "$above")
      done
    done
    path=${folder%/}/$(basename -- "$path")
    [[ -L $path ]] || break
    ((++links < 40)) || { printf '%s' "$path"; return 1; }
    above=$(readlink -- "$path")
    [[ $above == /* ]] || above=$folder/$above
    path=$above
  done
  [[ $(find "$path" -maxdepth 0 -type f -user root ! -perm /022) ]] || { printf '%s' "$path"; return 1; }
}

# A job sees none of these folders.
check_seen() { # OPTION PATH
  local real
  real=$(readlink -m -- "$2")
  case $real/ in
    /root/* | /home/* | /run/user/*) fail "$1: a job cannot see $real, as it can nothing below /root and /home" ;;
  esac
}

check_model() {
  [[ -n $model ]] || return 0
  check_seen --model "$model"
  [[ $(find "$model/model.safetensors" -maxdepth 0 -perm -004 2>/dev/null) ]] ||
    fail "--model: there is no $model/model.safetensors that everybody may read"
}

# Without it the runner ends when it is to register, behind the token.
check_libraries() {
  ((dry)) && return
  # Read to its end: ldconfig would fail if grep went away before.
  [[ $(ldconfig -p | grep -c 'libicuuc\.so') -gt 0 ]] ||
    fail 'the runner needs libicu: your package of it, or bin/installdependencies.sh of the release'
}

check_idle() {
  ((dry || force)) && return
  ! pgrep -u "$user" -f 'bin/Runner\.Worker' >/dev/null 2>&1 ||
    fail 'a job is running, and would be lost: wait for its end, or --force'
}

check_python() {
  local other environment
  [[ -x $python ]] || fail "there is no $python"
  check_seen --python "$python"
  other=$(is_roots "$python") || fail "$other must be root's, and nobody else's to write"
  # What it imports runs as well.
  environment=$(dirname -- "$(dirname -- "$python")")
  if [[ -e $environment/pyvenv.cfg ]]; then
    other=$(find "$environment" ! -type l \( ! -user root -o -perm /022 \) -print -quit)
    [[ -z $other ]] || fail "$other must be root's, and nobody else's to write"
  fi
}

check_machine() {
  ((dry)) && return
  ((EUID == 0)) || fail "must be run by root, not by $(id -un); --dry-run says what it would do"
  command -v systemctl >/dev/null || fail 'there is no systemd here'
  command -v nvidia-smi >/dev/null || fail 'there is no driver: nvidia-smi is missing'
  if id "$user" >/dev/null 2>&1; then
    local group
    for group in $(id -nG "$user"); do
      case $group in
        sudo | wheel | admin | docker | lxd | libvirt | disk | root)
          fail "$user is in the group '$group', which is as good as root" ;;
      esac
    done
    [[ $(id -u "$user") -ne 0 ]] || fail "$user is root"
  fi
  check_idle
  check_model
  # Before root runs it.
  check_python
  "$python" -I -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' ||
    fail "$python sees no CUDA device"
  "$python" -I -c 'import asv, triton' || fail "$python lacks asv or triton"
}

# --- What is done ---------------------------------------------------------------------------------

run() { # COMMAND...
  if ((dry)); then
    printf '+ %s\n' "$*"
  else
    "$@"
  fi
}

put() { # MODE FILE, whose text comes by standard input
  if ((dry)); then
    printf '+ write %s (mode %s)\n' "$2" "$1"
    sed 's/^/    /'
  else
    # Nobody may read a secret in the moment between the file and its mode.
    install -D -m "$1" /dev/null "$2.new"
    cat >"$2.new"
    mv "$2.new" "$2"
  fi
}

make_user() {
  if id "$user" >/dev/null 2>&1; then
    echo "the user $user is there"
  else
    run useradd --system --home-dir "$state/home" --no-create-home --shell /usr/sbin/nologin "$user"
  fi
  run install -d -o root -g root -m 755 "$state"
}

unpack_runner() {
  if [[ -r $lib/sha256 && $(<"$lib/sha256") == "$sha256" ]]; then
    echo 'this release is unpacked'
    return
  fi
  if ((dry)); then
    printf '+ check that %s has the checksum %s\n' "$tarball" "$sha256"
  else
    printf '%s  %s\n' "$sha256" "$tarball" | sha256sum --check --quiet --strict ||
      fail "$tarball has another checksum than --sha256 says"
  fi
  run rm -rf "$lib/release.new"
  run install -d -m 755 "$lib" "$lib/release.new"
  run tar -xzf "$tarball" -C "$lib/release.new" --no-same-owner
  run rm -rf "$lib/release"
  run mv "$lib/release.new" "$lib/release"
  put 644 "$lib/sha256" <<<"$sha256"
}

# Runs as root before each job, and lends the token to one command of the runner's user.
write_prepare() {
  put 755 "$lib/prepare" <<EOF
#!/usr/bin/env bash
# Written by setup_gpu_runner.sh. Makes the job's folders anew, and registers for one job.
set -euo pipefail
umask 077
# Nobody but root writes beside these folders, so that nothing there outlives a job.
install -d -o root -g root -m 755 $state
find $state -xdev -mindepth 1 -delete
install -d -o $user -g $user -m 700 $folders
cp -r $lib/release/. $state/runner
cp $etc/job.env $state/runner/.env
chown -R $user:$user $state/runner
if [[ -x $etc/token-helper ]]; then
  token=\$($etc/token-helper)
else
  token=\$(<$etc/token)
  # Whatever comes of it, it is not used a second time.
  rm -f $etc/token
fi
[[ \$token =~ ^[A-Za-z0-9_-]{16,256}\$ ]] || { echo 'gpu-runner: that is no token' >&2; exit 1; }
cd $state/runner
# The runner takes what ACTIONS_RUNNER_INPUT_TOKEN has, and removes it from its environment.
export ACTIONS_RUNNER_INPUT_TOKEN=\$token
setpriv --reuid $user --regid $user --clear-groups --no-new-privs --inh-caps=-all \\
  env -u NOTIFY_SOCKET HOME=$state/home ./config.sh --unattended --ephemeral --disableupdate --replace \\
  --url $url --name $name --labels $labels --work $state/work
EOF
}

write_settings() {
  {
    printf 'ASV_MACHINE=%s\nPYTHON=%s\nLANG=C.UTF-8\n' "$name" "$python"
    if [[ -n $model ]]; then printf 'LAB_MODEL=%s\n' "$model"; fi
  } | put 644 "$etc/job.env"
  printf '%s=%s\n' url "$url" name "$name" python "$python" model "$model" clocks "$clocks" |
    put 644 "$remembered"
}

take_token() {
  if [[ -n $token_helper ]]; then
    run install -D -o root -g root -m 700 "$token_helper" "$etc/token-helper"
    run rm -f "$etc/token"
  elif [[ -n $token_file ]]; then
    if ((dry)); then
      printf '+ put what %s has into %s/token (mode 600)\n' "$token_file" "$etc"
    else
      local token
      if [[ $token_file == - ]]; then
        IFS= read -r token || [[ -n $token ]] || fail 'standard input is empty'
      else
        token=$(<"$token_file")
      fi
      [[ $token =~ ^[A-Za-z0-9_-]{16,256}$ ]] || fail 'that is no token'
      put 600 "$etc/token" <<<"$token"
    fi
    # Before a job a helper is asked first.
    run rm -f "$etc/token-helper"
  fi
}

find_devices() {
  local device
  for device in /dev/nvidia[0-9]* /dev/nvidiactl /dev/nvidia-uvm /dev/nvidia-uvm-tools; do
    if [[ -c $device ]]; then devices+="DeviceAllow=$device rw"$'\n'; fi
  done
  if ((dry)) && [[ -z $devices ]]; then devices=$'# DeviceAllow= for each /dev/nvidia*\n'; fi
  [[ -n $devices ]] || fail 'there is no /dev/nvidia*'
}

write_unit() {
  local devices=''
  find_devices
  put 644 "$unit" <<EOF
# Written by setup_gpu_runner.sh
[Unit]
Description=Ephemeral runner for GPU benchmarks
Documentation=$url/blob/main/docs/gpu-runner.md
Wants=network-online.target
After=network-online.target gpu-clocks.service
# A runner is good for one job, and for each it needs a token.
ConditionPathExists=|$etc/token
ConditionPathExists=|$etc/token-helper
# What does not answer now may answer in an hour; meanwhile it is asked twice a minute.
StartLimitIntervalSec=0

[Service]
User=$user
Group=$user
WorkingDirectory=$state
Environment=HOME=$state/home
ExecStartPre=+$lib/prepare
ExecStart=$state/runner/run.sh
ExecStopPost=+/usr/bin/env find $state -xdev -mindepth 1 -delete
Restart=always
RestartSec=30
# Whatever a job has left running ends with it.
KillMode=control-group
TimeoutStopSec=30
UMask=0077

# Reads the system, writes its own folders, which ExecStartPre= has made.
ProtectSystem=strict
ReadWritePaths=$folders
InaccessiblePaths=$etc
ProtectHome=yes
PrivateTmp=yes
PrivateIPC=yes
RemoveIPC=yes

# The GPU, and no other device.
DevicePolicy=closed
$devices
# No way up. Memory may be made executable: Triton, numba and the runner compile.
NoNewPrivileges=yes
CapabilityBoundingSet=
AmbientCapabilities=
SupplementaryGroups=
RestrictSUIDSGID=yes
RestrictNamespaces=yes
RestrictRealtime=yes
LockPersonality=yes
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
ProtectProc=invisible
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK

# Where clouds give out the credentials of a machine.
IPAddressDeny=169.254.0.0/16 fe80::/10 fd00:ec2::254 168.63.129.16 100.100.100.200
TasksMax=4096
OOMPolicy=stop

[Install]
WantedBy=multi-user.target
EOF
}

# By root, at each start of the machine: no job may change these, and no job has to.
write_clocks() {
  local lock=''
  [[ -n $clocks ]] && lock="ExecStart=/usr/bin/env nvidia-smi -lgc $clocks,$clocks"
  put 644 "$clocks_unit" <<EOF
# Written by setup_gpu_runner.sh
[Unit]
Description=Persistence and clocks of the GPU
Before=gpu-runner.service

[Service]
Type=oneshot
RemainAfterExit=yes
ExecStart=/usr/bin/env nvidia-smi -pm 1
# Makes /dev/nvidia-uvm, which a job may not.
ExecStart=-/usr/bin/env nvidia-modprobe -u -c=0
$lock
ExecStop=-/usr/bin/env nvidia-smi -rgc

[Install]
WantedBy=multi-user.target
EOF
}

check_options
check_machine
check_libraries
unpack_runner
make_user
write_settings
write_prepare
write_clocks
run systemctl daemon-reload
run systemctl enable gpu-clocks.service
# It stays active once it has run, and would not run again for other clocks.
run systemctl restart gpu-clocks.service
# After the clocks, which make the devices that it names.
write_unit
take_token
run systemctl daemon-reload
run systemctl enable gpu-runner.service
run systemctl restart gpu-runner.service
if ((dry)); then
  echo 'nothing was done'
else
  echo "$name is registered once the unit says so: journalctl -u gpu-runner"
fi
