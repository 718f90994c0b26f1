"""The peer of bench/gpu_train: the same GPT-2 under PyTorch or Accelerate, on one GPU.

usage: python bench/peers/gpu_train.py [--engine torch|accelerate] [--strategy no_shard|ddp|zero2|zero3] [--autocast] ...
       python bench/peers/gpu_train.py --make FOLDER   writes the first weights for both sides

It is a job of one process by itself, without torchrun; with --cpu over Gloo, else over NCCL. FSDP2 gathers parameters in bf16
and reduces gradients in fp32, as bench/gpu_train --divide does; its blocks compute in bf16 throughout, or, with --autocast,
as Muster and Accelerate do. Prints one JSON line, as bench/gpu_train does.
"""

import argparse
import contextlib
import json
import os
import resource
import socket
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn


def parse():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--engine", choices=("torch", "accelerate"), default="torch")
    parser.add_argument("--strategy", choices=("no_shard", "ddp", "zero2", "zero3"), default="no_shard")
    parser.add_argument("--precision", choices=("no", "bf16"), default="bf16")
    parser.add_argument("--activation", choices=("gelu_new", "gelu_tanh"), default="gelu_new")
    parser.add_argument("--model")
    parser.add_argument("--make")
    for name, default in (("layers", 12), ("width", 768), ("heads", 12), ("context", 1024), ("vocab", 50257),
                          ("batch_size", 8), ("warmup", 10), ("steps", 10), ("blocks", 5)):
        parser.add_argument("--" + name, type=int, default=default)
    parser.add_argument("--trace", help="folder for a trace of three more steps")
    parser.add_argument("--clip_norm", type=float, default=1)
    parser.add_argument("--autocast", action="store_true", help="of FSDP2; without sharding bf16 is always autocast's")
    parser.add_argument("--cpu", action="store_true")
    return parser.parse_args()


def make_net(flags):
    from transformers import GPT2Config, GPT2LMHeadModel

    if flags.model:
        return GPT2LMHeadModel.from_pretrained(flags.model, dtype=torch.float32, attn_implementation="sdpa")
    torch.manual_seed(1)
    config = GPT2Config(vocab_size=flags.vocab, n_positions=flags.context, n_embd=flags.width, n_layer=flags.layers,
                        n_head=flags.heads, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, attn_implementation="sdpa",
                        activation_function="gelu_new" if flags.activation == "gelu_new" else "gelu_pytorch_tanh")
    return GPT2LMHeadModel(config)


def loader_of(flags):
    rows = 8 * flags.batch_size
    ids = (torch.arange(rows * flags.context) * 7919).remainder(flags.vocab).view(rows, flags.context)
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(ids), batch_size=flags.batch_size,
                                       pin_memory=not flags.cpu)


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)


class Meter:
    def __init__(self, flags, device):
        self.flags, self.device = flags, device
        self.count, self.start, self.milliseconds, self.losses = 0, None, [], []
        self.profile = None

    def goes(self):
        return len(self.milliseconds) < self.flags.blocks or (self.profile is not None and self.count < 3)

    def step(self, loss):
        self.count += 1
        if self.profile is not None:
            if not self.goes():
                loss.item()
                self.profile.stop()
                os.makedirs(self.flags.trace, exist_ok=True)
                self.profile.export_chrome_trace(self.flags.trace + "/profile_0.json")
            return self.goes()
        if self.count < (self.flags.warmup if self.start is None else self.flags.steps):
            return True
        self.losses.append(loss.item())
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        now = time.perf_counter()
        if self.start is not None:
            self.milliseconds.append(1e3 * (now - self.start) / self.flags.steps)
        self.start, self.count = now, 0
        if not self.goes() and self.flags.trace:
            self.profile = torch.profiler.profile()
            self.profile.start()
        return self.goes()

    def print(self):
        flags, median = self.flags, statistics.median(self.milliseconds)
        cuda = self.device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self.device) if cuda else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(json.dumps({
            "bench": "gpu_train", "engine": flags.engine, "device": torch.cuda.get_device_name(self.device) if cuda else "CPU",
            "strategy": flags.strategy, "autocast": flags.autocast, "precision": flags.precision, "batch_size": flags.batch_size,
            "tokens_per_s": round(flags.batch_size * flags.context * 1e3 / median), "ms_per_step": round(median, 3),
            "fastest_ms": round(min(self.milliseconds), 3), "slowest_ms": round(max(self.milliseconds), 3),
            "peak_mib": round(peak / 2**20), "losses": [round(loss, 5) for loss in self.losses],
            "load": round(os.getloadavg()[0], 2)}), flush=True)


def train_torch(flags):
    device = torch.device("cpu") if flags.cpu else torch.device("cuda", 0)
    net = make_net(flags).to(device).train()
    bf16 = flags.precision == "bf16"
    autocast = bf16
    if flags.strategy != "no_shard":
        dist.init_process_group("gloo" if flags.cpu else "nccl", **({} if flags.cpu else {"device_id": device}))
    if flags.strategy == "ddp":
        model = nn.parallel.DistributedDataParallel(net, gradient_as_bucket_view=True)
    elif flags.strategy == "no_shard":
        model = net
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32) if bf16 else MixedPrecisionPolicy()
        settings = {"mesh": init_device_mesh(device.type, (1,)), "mp_policy": policy,
                    "reshard_after_forward": flags.strategy == "zero3"}
        for block in net.transformer.h:
            fully_shard(block, **settings)
        model = fully_shard(net, **settings)
        autocast = bf16 and flags.autocast
    optimizer, loader, meter = adamw(model.parameters()), loader_of(flags), Meter(flags, device)
    while meter.goes():
        for (ids,) in loader:
            ids = ids.to(device, non_blocking=True)
            with torch.autocast(device.type, torch.bfloat16) if autocast else contextlib.nullcontext():
                loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            if flags.clip_norm > 0:
                nn.utils.clip_grad_norm_(model.parameters(), flags.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            if not meter.step(loss):
                break
    meter.print()


def train_accelerate(flags):
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = None
    if flags.strategy != "no_shard":
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2, reshard_after_forward=flags.strategy == "zero3", auto_wrap_policy="transformer_based_wrap",
            transformer_cls_names_to_wrap=["GPT2Block"], cpu_ram_efficient_loading=False)
        os.environ["ACCELERATE_USE_FSDP"] = "true"
    accelerator = Accelerator(mixed_precision=flags.precision, cpu=flags.cpu, fsdp_plugin=plugin)
    net = make_net(flags).train()
    model, optimizer, loader = accelerator.prepare(net, adamw(net.parameters()), loader_of(flags))
    meter = Meter(flags, accelerator.device)
    while meter.goes():
        for (ids,) in loader:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            accelerator.backward(loss)
            if flags.clip_norm > 0:
                accelerator.clip_grad_norm_(model.parameters(), flags.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
            if not meter.step(loss):
                break
    meter.print()


def main():
    flags = parse()
    if flags.make:
        make_net(flags).save_pretrained(flags.make)
        return
    # Without these variables Accelerate takes the model as it is.
    if flags.strategy != "no_shard":
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1",
                           "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)})
    if flags.engine == "accelerate":
        train_accelerate(flags)
    else:
        train_torch(flags)
    if dist.is_initialized():
        dist.destroy_process_group()


main()
