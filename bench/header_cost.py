#!/usr/bin/env python3
"""usage: bench/header_cost.py [--rounds N]

What `#include "muster/muster.h"` costs beside <torch/torch.h>: headers, lines after the preprocessor, and the CPU
seconds that g++ takes for examples/cmake_consumer and for the same training in plain LibTorch (bench/bare_libtorch.cc).
Both are compiled in turn, N times (3); the least time of each counts, since other work on the machine only adds to it.
Prints one JSON line.
"""

import argparse
import json
import os
import resource
import subprocess
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
_DEPS = os.environ.get("MUSTER_DEPS") or os.path.expanduser("~/.cache/muster/deps/torch-2.11.0")
_TORCH = os.path.join(_DEPS, "torch", "include")
_COMPILER = ["g++", "-std=c++20", "-O2", "-I" + _ROOT, "-isystem", _TORCH, "-isystem", _TORCH + "/torch/csrc/api/include"]


def _run(arguments, text=None):
    return subprocess.run(_COMPILER + arguments, input=text, capture_output=True, text=True, check=True).stdout


def headers(include):
    text = "#include %s\n" % include
    found = _run(["-M", "-x", "c++", "-"], text).replace("\\\n", " ").split()
    return set(f for f in found if "/" in f)


def lines(include):
    return _run(["-E", "-P", "-x", "c++", "-"], "#include %s\n" % include).count("\n")


def seconds(source):
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    _run(["-c", "-o", os.devnull, os.path.join(_ROOT, source)])
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    rounds = parser.parse_args().rounds
    torch, muster = headers("<torch/torch.h>"), headers('"muster/muster.h"')
    own = [h for h in muster if os.path.abspath(h).startswith(_ROOT + os.sep)]
    line = {"bench": "header_cost", "headers": len(muster), "torch_headers": len(torch), "own_headers": len(own)}
    torch, muster = lines("<torch/torch.h>"), lines('"muster/muster.h"')
    line |= {"lines": muster, "torch_lines": torch, "added_lines": round((muster - torch) / torch, 4)}
    programs = ("bench/bare_libtorch.cc", "examples/cmake_consumer/main.cc")
    times = [[seconds(source) for source in programs] for _ in range(rounds)]
    bare, consumer = (min(t[i] for t in times) for i in range(2))
    line |= {"muster_cpu_s": round(consumer, 2), "libtorch_cpu_s": round(bare, 2), "ratio": round(consumer / bare, 3)}
    print(json.dumps(line | {"load": round(os.getloadavg()[0], 2)}))


if __name__ == "__main__":
    sys.exit(main())
