"""The peer of bench/run_sharding: examples/lm's decoder under PyTorch's FSDP2 or DDP, on Gloo.

usage: torchrun --nproc_per_node 2 bench/peers/fsdp2.py no_shard|zero2|zero3 STEPS WIDTH LAYERS CONTEXT BATCH_SIZE

Rank 0 prints one JSON line, as examples/lm does.
"""

import json
import os
import resource
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
                   for part in self.qkv(self.norm1(x)).split(width, -1))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    def __init__(self, width, layers, context):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, ids):
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return F.linear(self.norm(x), self.tokens.weight)


def main():
    strategy = sys.argv[1]
    steps, width, layers, context, batch_size = map(int, sys.argv[2:7])
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = Decoder(width, layers, context)
    if strategy == "no_shard":
        model = nn.parallel.DistributedDataParallel(model)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for block in model.blocks:
            fully_shard(block, mesh=mesh, reshard_after_forward=strategy == "zero3")
        fully_shard(model, mesh=mesh, reshard_after_forward=strategy == "zero3")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, weight_decay=0.1, fused=True)
    ids = torch.randint(0, 256, (steps, batch_size, context + 1), generator=torch.Generator().manual_seed(dist.get_rank()))
    for step in range(steps):
        if step == 2:
            start = time.perf_counter()
        logits = model(ids[step, :, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[step, :, 1:].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()
    seconds = time.perf_counter() - start
    if dist.get_rank() == 0:
        print(json.dumps({"ms_per_step": round(1e3 * seconds / (steps - 2), 2),
                          "peak_rss_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "load": round(os.getloadavg()[0], 2)}))
    dist.destroy_process_group()


main()
