#!/usr/bin/env bash
# Builds the package of the control plane, installs it into a scratch root, runs it there, removes it, and checks that
# nothing is left. As a Bazel test it uses the programs that were built before.
source "$(dirname "$0")/../../tools/internal/common.sh"

scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
root=$scratch/root

fail() {
  echo "package test: $*" >&2
  exit 1
}

tools/package --bin "${1:-.}" --out "$scratch"
package=$(echo "$scratch"/muster-control_*_amd64.deb)
needs=$(dpkg-deb --field "$package" Depends)
for library in libc6 libgrpc++ libprotobuf libsqlite3-0 libssl3; do
  [[ $needs == *"$library"* ]] || fail "it does not need $library: $needs"
done
[[ $needs != *torch* ]] || fail "the control plane needs torch: $needs"

# The packages it needs are in this system and not in the scratch root.
mkdir -p "$root"/var/lib/dpkg/{info,updates,triggers} "$root/etc"
touch "$root/var/lib/dpkg/status" "$root/var/lib/dpkg/available"
as_root=()
[[ $(id -u) == 0 ]] || as_root=(unshare --user --map-root-user --)
dpkg_in() {
  "${as_root[@]}" dpkg --root="$root" --log=/dev/null --force-script-chrootless --force-depends --force-not-root --force-bad-path "$@" \
    >"$scratch/dpkg.log" 2>&1 || { cat "$scratch/dpkg.log" >&2; fail "dpkg $*"; }
}
dpkg_in --install "$package"
[[ $(dpkg-query --admindir="$root/var/lib/dpkg" -W -f='${db:Status-Status}' muster-control) == installed ]] ||
  fail "dpkg does not call it installed"

[[ $("$root/usr/bin/muster" version) == "muster "* ]] || fail "muster version"
[[ $("$root/usr/bin/muster" coordinator --version) == "muster-coordinator "* ]] || fail "muster coordinator --version"
"$root/usr/bin/muster-agent" --help >/dev/null || fail "muster-agent --help"
[[ $("$root/usr/bin/muster" launch --num_processes 2 --cpu -- sh -c 'echo "rank $RANK"' | sort) == *"rank 0"*"rank 1"* ]] ||
  fail "the installed muster runs no job"
for file in etc/muster/coordinator.yaml etc/muster/agent.yaml lib/systemd/system/muster-jobs.service usr/share/man/man1/muster-config.1.gz usr/share/bash-completion/completions/muster \
  usr/share/doc/muster-control/copyright usr/share/doc/muster-control/docs/coordinator.md; do
  [[ -s $root/$file ]] || fail "no $file"
done
if command -v systemd-sysusers >/dev/null; then
  for user in muster muster-jobs; do
    grep -q "^$user:" "$root/etc/passwd" || fail "the user $user was not made"
  done
fi
if command -v systemd-analyze >/dev/null; then
  # Imitates a machine that has the programs where the units name them.
  for unit in "$root"/lib/systemd/system/*.service; do
    name=$(basename "$unit")
    sed "s|=/usr/bin/|=$root/usr/bin/|" "$unit" >"$scratch/$name"
    systemd-analyze verify --man=no --recursive-errors=no "$scratch/$name" >"$scratch/verify.log" 2>&1 || {
      cat "$scratch/verify.log" >&2
      fail "systemd-analyze verify $name"
    }
  done
fi

# The removal from a running system stops all units. Here a script only notes what it is told to do.
mkdir "$scratch/bin"
printf '#!/bin/sh\necho "$@" >>%s/systemctl.log\n' "$scratch" >"$scratch/bin/systemctl"
chmod +x "$scratch/bin/systemctl"
dpkg-deb --control "$package" "$scratch/control"
for script in prerm postrm; do
  sed "s|/run/systemd/system|$scratch|" "$scratch/control/$script" | PATH=$scratch/bin:$PATH DPKG_ROOT='' sh -s remove
done
for unit in "$root"/lib/systemd/system/*.service; do
  grep -q "\(stop\|--now\) .*$(basename "$unit")" "$scratch/systemctl.log" || fail "the removal leaves $(basename "$unit") running"
done

dpkg_in --purge muster-control
# Only what dpkg and the accounts keep in the root may be left; the package's files and folders are gone.
left=$(cd "$root" && find . -mindepth 1 ! -path './var' ! -path './var/lib' ! -path './var/lib/dpkg*' ! -path './etc' \
  ! -regex '\./etc/\(passwd\|group\|shadow\|gshadow\|subuid\|subgid\|\.pwd\.lock\)-?')
[[ -z $left ]] || fail "left after the removal: $left"
echo "package test: passed"
