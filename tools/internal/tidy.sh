#!/usr/bin/env bash
# usage: tools/internal/tidy.sh [FILE...]
#
# Runs clang-tidy-14 with .clang-tidy on the code of base, rpc and coordinator (or the named files of these), one process
# a core. A finding is an error. Tests are left out, and code with torch: parsing it takes minutes.
source "$(dirname "$0")/common.sh"

command -v clang-tidy-14 >/dev/null || die "clang-tidy-14 is missing: run tools/setup first"
files=("$@")
if ((${#files[@]} == 0)); then
  mapfile -t files < <(git ls-files 'base/*.cc' 'rpc/*.cc' 'coordinator/*.cc' |
    grep -v -e '_test\.cc$' -e '/fake_' -e '/test_')
fi
# The generated headers.
"$BAZEL" build --noshow_progress //proto:all </dev/null
printf '%s\0' "${files[@]}" |
  xargs -0 -n 1 -P "$(nproc)" bash -c 'clang-tidy-14 --quiet "$0" -- -std=c++20 -I. -Ibazel-bin -Wno-everything 2>&1 |
    grep -v -e "warnings generated" -e "^Suppressed" -e "^Use -header"; exit "${PIPESTATUS[0]}"'
