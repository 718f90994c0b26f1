"""Accelerate's disk_offload of the model that `bench/offload --make` wrote: bytes of weights per second of a forward
pass, from the disk and from the page cache. One JSON line."""

import argparse
import json
import os
import statistics
import tempfile
import time

import accelerate
import safetensors.torch
import torch


def uncache(folder):
    for name in os.listdir(folder):
        file = os.open(os.path.join(folder, name), os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    flags = parser.parse_args()
    state = safetensors.torch.load_file(flags.folder + "/model.safetensors")
    width = state["0.weight"].shape[0]
    with torch.device("meta"):
        net = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in state])
    net.load_state_dict(state, assign=True)
    total = sum(tensor.nbytes for tensor in state.values())
    del state
    x = torch.randn(flags.batch, width)
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder, torch.no_grad():
        start = time.perf_counter()
        accelerate.disk_offload(net, folder)
        setup = time.perf_counter() - start
        cold, warm = [], []
        for times, cached in ((cold, False), (warm, True)):
            net(x)
            for _ in range(flags.rounds):
                if not cached:
                    uncache(folder)
                start = time.perf_counter()
                net(x)
                times.append(total / (time.perf_counter() - start))
    print(json.dumps({"peer": "accelerate " + accelerate.__version__, "setup_s": round(setup, 3),
                      "cold_gbps": round(statistics.median(cold) / 1e9, 3),
                      "warm_gbps": round(statistics.median(warm) / 1e9, 3)}))


main()
