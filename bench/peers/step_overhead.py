"""The peer of bench/step_overhead: CPU microseconds that Hugging Face Accelerate adds to a PyTorch step.

Same model, same step; needs torch and accelerate importable. Prints one JSON line.
"""

import json
import os
import statistics
import sys
import time

import torch
from accelerate import Accelerator


def net():
    layers = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(36)])
    return layers


def main():
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    rounds = int(sys.argv[2]) if len(sys.argv) > 2 else 9
    torch.set_num_threads(1)
    accelerator = Accelerator(cpu=True)
    xs, ys = torch.randn(steps * 4, 8), torch.randn(steps * 4, 8)
    data = torch.utils.data.TensorDataset(xs, ys)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    loss_of = torch.nn.functional.mse_loss

    raw = net()
    raw_optimizer = torch.optim.AdamW(raw.parameters(), fused=True)
    raw_schedule = torch.optim.lr_scheduler.LambdaLR(raw_optimizer, lambda s: 1 / (1 + s))
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: 1 / (1 + s))
    model, optimizer, prepared, schedule = accelerator.prepare(model, optimizer, loader, schedule)

    raw_us, ours_us = [], []
    for i in range(rounds + 1):
        start = time.process_time()
        for x, y in loader:
            loss_of(raw(x), y).backward()
            torch.nn.utils.clip_grad_norm_(raw.parameters(), 1.0)
            raw_optimizer.step()
            raw_schedule.step()
            raw_optimizer.zero_grad()
        a = (time.process_time() - start) / steps * 1e6
        start = time.process_time()
        for x, y in prepared:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model(x), y))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
        b = (time.process_time() - start) / steps * 1e6
        if i:
            raw_us.append(a)
            ours_us.append(b)
    added = statistics.median(b - a for a, b in zip(raw_us, ours_us))
    print(json.dumps({
        "bench": "step_overhead_accelerate", "parameters": 72,
        "raw_cpu_us": round(statistics.median(raw_us), 1),
        "accelerate_cpu_us": round(statistics.median(ours_us), 1),
        "added_cpu_us": round(added, 1),
        "load": round(os.getloadavg()[0], 2),
    }))


main()
