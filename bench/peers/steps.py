"""The peer of bench/jobs/steps.cc: the same training in PyTorch, under torch.distributed.run."""

import os
import sys
import time

import torch
import torch.distributed as dist


def main():
    folder = sys.argv[1]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    path = f"{folder}/pid_{rank}"
    with open(path + ".new", "w") as file:
        file.write(str(os.getpid()))
    os.rename(path + ".new", path)
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 5), torch.nn.MaxPool2d(2), torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3), torch.nn.MaxPool2d(2), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(800, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    images, labels = torch.randn(64, 64, 1, 28, 28), torch.randint(10, (64, 64))
    steps = open(f"{folder}/steps", "a", encoding="utf-8") if rank == 0 else None

    def goes():
        # Rank 0 decides, so that no rank waits for one that has left.
        stops = torch.tensor([float(os.path.exists(f"{folder}/stop"))])
        dist.broadcast(stops, 0)
        return not stops.item()

    while goes():
        for x, y in zip(images, labels):
            torch.nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            if steps:
                steps.write(f"{time.time():.6f}\n")
                steps.flush()
    dist.destroy_process_group()


main()
