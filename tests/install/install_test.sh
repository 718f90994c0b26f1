#!/usr/bin/env bash
# Installs Muster into a scratch prefix, builds examples/cmake_consumer against it and runs that on one process and
# on two. A step of tools/test, not a Bazel test, because it calls Bazel.
source "$(dirname "$0")/../../tools/internal/common.sh"

# The folder is on the disk of the LibTorch files, so that they are linked and not copied.
scratch=$(realpath "$(mktemp -d "$MUSTER_LIBTORCH/../.install-test-XXXXXX")")
trap 'rm -rf "$scratch"' EXIT
prefix=$scratch/first

tools/install --prefix "$prefix" "$@"
# An installed tree may be moved as a whole.
mv "$prefix" "$scratch/moved"
prefix=$scratch/moved

cmake -S examples/cmake_consumer -B "$scratch/build" -DCMAKE_PREFIX_PATH="$prefix" -DCMAKE_BUILD_TYPE=Release
cmake --build "$scratch/build"
train=$scratch/build/train

# expect WHAT COMMAND...: the command succeeds and its output holds WHAT.
expect() {
  local wanted=$1 output
  shift
  output=$("$@" 2>&1 </dev/null) || { echo "$output"; die "failed: $*"; }
  [[ $output == *"$wanted"* ]] || { echo "$output"; die "no '$wanted' in the output of: $*"; }
}

expect "libtorch_cpu.so => $(realpath "$prefix")/lib/" ldd "$train"
expect "libtorch_cpu.so => $(realpath "$prefix")/" ldd "$prefix/bin/mnist"
MUSTER_PROJECT_DIR=$scratch/alone expect "epoch 2: 500 of 500 right" "$train"
MUSTER_PROJECT_DIR=$scratch/two expect "epoch 2: 500 of 500 right" \
  "$prefix/bin/muster" launch --num_processes 2 --cpu -- "$train"
expect "0.1.0" "$prefix/bin/muster" --version
expect "muster-coordinator 0.1.0" "$prefix/bin/muster" coordinator --version
expect ".TH MUSTER" cat "$prefix/share/man/man1/muster-launch.1"
for file in bash-completion/completions/muster zsh/site-functions/_muster fish/vendor_completions.d/muster.fish; do
  expect "checkpoints" cat "$prefix/share/$file"
done

# The prefix brings no protobuf of its own, over which another LibTorch user would trip.
[[ ! -e $prefix/lib/muster/torch/include/google ]] || die "the prefix holds protobuf headers"
if "$prefix/bin/muster" launch --num_processes 2 --cpu -- "$scratch/no-such-program" >/dev/null 2>&1; then
  die "muster launch of a missing program succeeded"
fi

# If no files can be linked, as on another disk, cp has made the folders before it fails.
mkdir "$scratch/bin"
cat >"$scratch/bin/cp" <<'END'
#!/bin/sh
case $1 in
  -al*)
    for to; do from=${before:-}; before=$to; done
    [ ! -d "$from" ] || mkdir -p "$to"
    exit 1
    ;;
esac
exec /bin/cp "$@"
END
chmod +x "$scratch/bin/cp"
# The modes do not depend on the mask of the user who installs, either.
(umask 077 && PATH=$scratch/bin:$PATH tools/install --prefix "$scratch/copied" --no-build)
closed=$(find "$scratch/copied" ! -type l ! -perm 755 ! \( -type f -perm 644 \) -printf '%m %p\n')
[[ -z $closed ]] || die "others cannot use what was installed: $closed"
for file in include/torch/csrc/api/include/torch/torch.h lib/libtorch_cpu.so; do
  cmp "$MUSTER_LIBTORCH/torch/$file" "$scratch/copied/lib/muster/torch/$file" || die "no copy of $file"
done
echo "install test: passed"
