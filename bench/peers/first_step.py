"""The peer of bench/launch: one DDP step of the MNIST net over Gloo, under torch.distributed.run."""

import torch
import torch.distributed as dist


def main():
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = torch.nn.Sequential(
        torch.nn.Conv2d(1, 16, 5), torch.nn.MaxPool2d(2), torch.nn.ReLU(),
        torch.nn.Conv2d(16, 32, 3), torch.nn.MaxPool2d(2), torch.nn.ReLU(),
        torch.nn.Flatten(), torch.nn.Linear(800, 128), torch.nn.ReLU(), torch.nn.Linear(128, 10))
    model = torch.nn.parallel.DistributedDataParallel(net)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = torch.nn.functional.cross_entropy(model(torch.randn(64, 1, 28, 28)), torch.randint(10, (64,)))
    loss.backward()
    optimizer.step()
    dist.destroy_process_group()


main()
