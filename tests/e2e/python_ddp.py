"""A plain PyTorch program, as written for torchrun: DistributedDataParallel over Gloo, a checkpoint
every five steps, and a restart that continues from it. It knows nothing of Muster.

usage: python_ddp.py CHECKPOINT [--kill-rank-at STEP]
"""

import argparse
import os
import signal

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

STEPS = 20


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("checkpoint")
    parser.add_argument("--kill-rank-at", type=int, default=-1)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    rank, size = dist.get_rank(), dist.get_world_size()
    attempt = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0"))
    torch.manual_seed(0)
    net = torch.nn.Linear(8, 1)
    start = 0
    if os.path.exists(args.checkpoint):
        state = torch.load(args.checkpoint)
        net.load_state_dict(state["net"])
        start = state["step"]
    dist.barrier()
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    print(f"rank {rank} of {size} starts at step {start}", flush=True)
    for step in range(start, STEPS):
        if step == args.kill_rank_at and attempt == 0 and rank == size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        generator = torch.Generator().manual_seed(step * size + rank)
        x = torch.randn(16, 8, generator=generator)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 5 == 0:
            torch.save({"net": net.state_dict(), "step": step + 1}, args.checkpoint + ".new")
            os.replace(args.checkpoint + ".new", args.checkpoint)
    weights = [torch.empty_like(net.weight) for _ in range(size)]
    dist.all_gather(weights, net.weight.detach())
    assert all(torch.equal(other, weights[0]) for other in weights)
    print(f"rank {rank}: weights sum up to {net.weight.sum().item():.6f}", flush=True)
    dist.destroy_process_group()


main()
