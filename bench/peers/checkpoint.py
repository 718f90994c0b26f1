"""What others take to save and load the state of `bench/checkpoint`: parameters and two AdamW moments. Each save is on the
disk when its time ends (fsync), each load begins without the page cache. With --device cuda the state is on a GPU before
and after. What DCP's asynchronous save makes training wait is measured, too. As in bench/checkpoint, one round comes first
that does not count: it takes the memory, and imports what each way imports late. One JSON line of seconds, medians, and of that
first round DCP's wait; a way that fails is left out of it, with a word on stderr."""

import argparse
import json
import os
import shutil
import statistics
import sys
import tempfile
import time

import accelerate
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp


def files(folder):
    return [os.path.join(at, name) for at, _, names in os.walk(folder) for name in names]


def flush(folder, drop=False):
    for path in files(folder):
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        if drop:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--folder", required=True, help="on the disk that is measured")
    parser.add_argument("--gib", type=float, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    flags = parser.parse_args()
    on_gpu = flags.device == "cuda"
    torch.manual_seed(0)
    layers = max(1, int(flags.gib * 64 / 3 + 0.5))
    net = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(layers)])
    accelerator = accelerate.Accelerator(cpu=not on_gpu)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
    accelerator.backward(model(torch.ones(1, 2048, device=flags.device)).mean())
    optimizer.step()
    optimizer.zero_grad()

    def flat():
        state = {name: tensor.detach() for name, tensor in net.state_dict().items()}
        for i, moments in optimizer.state_dict()["state"].items():
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{i}.{key}"] = moments[key]
        return state

    def load_safetensors(at):
        for name, tensor in safetensors.torch.load_file(at + "/state.safetensors", device=flags.device).items():
            state[name].copy_(tensor)

    def load_torch(at):
        for name, tensor in torch.load(at + "/state.pt", weights_only=True).items():
            state[name].copy_(tensor)

    def wait():
        if on_gpu:
            torch.cuda.synchronize()

    state = flat()
    assert all(tensor.device.type == flags.device for tensor in state.values())
    ways = {
        "safetensors": (lambda at: safetensors.torch.save_file(state, at + "/state.safetensors"), load_safetensors),
        "torch": (lambda at: torch.save(state, at + "/state.pt"), load_torch),
        "dcp": (lambda at: dcp.save(state, checkpoint_id=at, no_dist=True),
                lambda at: dcp.load(state, checkpoint_id=at, no_dist=True)),
        "accelerate": (accelerator.save_state, accelerator.load_state),
    }
    saves, loads, stalls = {way: [] for way in ways}, {way: [] for way in ways}, []

    def measure(way, at):
        save, load = ways[way]
        wait()
        start = time.perf_counter()
        save(at)
        flush(at)
        saves[way].append(time.perf_counter() - start)
        flush(at, drop=True)
        start = time.perf_counter()
        load(at)
        wait()
        loads[way].append(time.perf_counter() - start)

    def measure_stall(at):
        wait()
        start = time.perf_counter()
        saving = dcp.async_save(state, checkpoint_id=at, no_dist=True)
        wait()
        stalls.append(time.perf_counter() - start)
        saving.result()

    with tempfile.TemporaryDirectory(dir=flags.folder) as folder:
        for number in range(flags.rounds + 1):
            for way in [*ways, "dcp_async"]:
                at = f"{folder}/{way}"
                os.makedirs(at)
                try:
                    measure_stall(at) if way == "dcp_async" else measure(way, at)
                except Exception as error:
                    print(f"{way}: {error!r}", file=sys.stderr)
                shutil.rmtree(at)
            if number == 0:
                first_stall = stalls[:]
                for times in (*saves.values(), *loads.values(), stalls):
                    times.clear()
    result = {"bench": "checkpoint_peers", "bytes": sum(tensor.nbytes for tensor in state.values())}
    for way in ways:
        if saves[way]:
            result[way + "_save_s"] = round(statistics.median(saves[way]), 3)
        if loads[way]:
            result[way + "_cold_load_s"] = round(statistics.median(loads[way]), 3)
    if stalls:
        result["dcp_async_stall_s"] = round(statistics.median(stalls), 4)
    if first_stall:
        result["dcp_async_first_stall_s"] = round(first_stall[0], 4)
    result["load"] = round(os.getloadavg()[0], 2)
    print(json.dumps(result))


main()
