"""Accelerate's disk_offload and cpu_offload of the model of bench/offload: bytes of weights per second of a forward pass. One
JSON line.

  --weights disk   the file that `bench/offload --make` wrote into --folder, from the disk and from the page cache
  --weights cpu    weights in host memory, as cpu_offload leaves them and in pinned memory, on a GPU
"""

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


def wait(device):
    if device.type != "cpu":
        torch.cuda.synchronize(device)


def make_net(state):
    width = state["0.weight"].shape[0]
    with torch.device("meta"):
        net = torch.nn.Sequential(*[torch.nn.Linear(width, width, bias=False) for _ in state])
    net.load_state_dict(state, assign=True)
    return net


def rate(net, x, device, total, rounds, before=lambda: None):
    net(x)
    rates, cpu_ms = [], []
    for _ in range(rounds):
        before()
        wait(device)
        start, cpu = time.perf_counter(), time.process_time()
        net(x)
        wait(device)
        rates.append(total / (time.perf_counter() - start))
        cpu_ms.append(1e3 * (time.process_time() - cpu) / (total / 2**30))
    return round(statistics.median(rates) / 1e9, 3), round(statistics.median(cpu_ms))


def disk(flags, device):
    state = safetensors.torch.load_file(flags.folder + "/model.safetensors")
    total = sum(tensor.nbytes for tensor in state.values())
    net, type_ = make_net(state), state["0.weight"].dtype
    x = torch.ones(flags.batch, state["0.weight"].shape[0], dtype=type_, device=device)
    del state
    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        start = time.perf_counter()
        accelerate.disk_offload(net, folder, execution_device=device)
        setup = time.perf_counter() - start
        cold, cold_cpu = rate(net, x, device, total, flags.rounds, lambda: uncache(folder))
        warm, warm_cpu = rate(net, x, device, total, flags.rounds)
    rates = {"cold_gbps": cold, "cold_cpu_ms_per_gib": cold_cpu, "warm_gbps": warm, "warm_cpu_ms_per_gib": warm_cpu}
    return {"setup_s": round(setup, 3), **rates}


def cpu(flags, device):
    type_ = getattr(torch, flags.dtype)
    result = {}
    for name in ("forward_gbps", "pinned_gbps"):
        state = {f"{i}.weight": torch.full((flags.width, flags.width), 1 / flags.width, dtype=type_) for i in range(flags.layers)}
        if name == "pinned_gbps":
            if device.type == "cpu":
                break
            state = {key: value.pin_memory() for key, value in state.items()}
        total = sum(tensor.nbytes for tensor in state.values())
        net = make_net(state)
        x = torch.ones(flags.batch, flags.width, dtype=type_, device=device)
        start = time.perf_counter()
        accelerate.cpu_offload(net, execution_device=device, state_dict=state)
        result.setdefault("setup_s", round(time.perf_counter() - start, 3))
        result[name], _ = rate(net, x, device, total, flags.rounds)
    return result


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder")
    parser.add_argument("--device", default="cpu", help="cpu, or the number of a GPU")
    parser.add_argument("--weights", default="disk", choices=["disk", "cpu"])
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--batch", type=int, default=1)
    flags = parser.parse_args()
    device = torch.device("cpu" if flags.device == "cpu" else f"cuda:{flags.device}")
    with torch.no_grad():
        result = disk(flags, device) if flags.weights == "disk" else cpu(flags, device)
    print(json.dumps({"peer": "accelerate " + accelerate.__version__, **result, "load": round(os.getloadavg()[0], 2)}))


main()
