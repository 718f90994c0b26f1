"""The peer of bench/run_train_step --widths: a step of four layers Linear(W) under Hugging Face Accelerate.

usage: torchrun ... linear_step.py W STEPS. Rank 0 prints one JSON line.
"""

import json
import os
import sys
import time

import torch
from accelerate import Accelerator

WARMUP, BATCH = 20, 64


def main():
    width, steps = int(sys.argv[1]), int(sys.argv[2])
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    layers = []
    for i in range(4):
        layers += [torch.nn.ReLU()] * (i > 0) + [torch.nn.Linear(width, width)]
    net = torch.nn.Sequential(*layers)
    torch.manual_seed(accelerator.process_index)
    x, y = torch.randn(BATCH, width), torch.randn(BATCH, width)
    model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters(), lr=1e-3, fused=True))
    for i in range(WARMUP + steps):
        if i == WARMUP:
            start = time.perf_counter()
        accelerator.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    if accelerator.is_main_process:
        print(json.dumps({"bench": "linear_step", "steps_per_s": steps / (time.perf_counter() - start),
                          "load": round(os.getloadavg()[0], 2)}), flush=True)


main()
