# Sourced by the programs of tools/: the environment that all of them rely on.

set -euo pipefail
REPO=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
cd "$REPO"

# CI machines may start us without HOME or USER; Bazel and the caches need both.
if [[ -z ${HOME:-} ]]; then
  HOME=$(getent passwd "$(id -u)" | cut -d: -f6)
  HOME=${HOME:-/tmp}
fi
: "${USER:=$(id -un 2>/dev/null || id -u)}"
export HOME USER

MUSTER_LIBTORCH=${MUSTER_DEPS:-$HOME/.cache/muster/deps/torch-2.11.0}

has_gpu() { [[ -e /dev/nvidia0 || -d /proc/driver/nvidia/gpus ]]; }

die() {
  echo "$(basename "$0"): $*" >&2
  exit 1
}

# The comment block at the head of the running program is its help.
usage() { sed -n '2,/^[^#]/{s/^# \{0,1\}//p}' "$0"; }

# The bazel to call; a wrapper may be put in its place.
BAZEL=${BAZEL:-bazel}
