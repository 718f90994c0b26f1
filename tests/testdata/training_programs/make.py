"""Records how PyTorch (2.11.0) trains small models by programs put together at random, for several numbers of ranks.

usage: python3 make.py              writes cases.jsonl and want.safetensors
       python3 make.py --check      trains the cases of two ranks on two Gloo ranks by Accelerate (1.15.0, DDP) and by FSDP2, and compares

A case is a model, an optimizer and micro-steps. Each rank has a copy of the model and batches of its own; where a window ends, a gradient is
the mean of those of the ranks (a rank that has none counts as zeros; without any there is none). README.md describes the fields.
"""

import json
import math
import os
import random
import sys
from contextlib import nullcontext

import torch
from safetensors.torch import load_file, save_file
from torch import nn

HERE = os.path.dirname(os.path.abspath(__file__))
DTYPES = {"float64": torch.float64, "float32": torch.float32}
SAMPLES = 24


def numbers(sizes, salt, dtype):
    """The same in every language: integer arithmetic and one division."""
    count = math.prod(sizes)
    i = torch.arange(count, dtype=torch.int64)
    return (((i * i * 31 + i * 37 + salt * 101 + 17) % 97).to(torch.float64) / 97 - 0.5).to(dtype).reshape(sizes)


def salt_of(name):
    return sum((k + 1) * ord(c) for k, c in enumerate(name)) % 1009


class Maker:
    def __init__(self, case):
        self.dtype = DTYPES[case["dtype"]]
        self.tied = dict(case["model"]["tied"])
        self.frozen = case["model"]["frozen"]
        self.made = {}

    def parameter(self, name, sizes):
        name = self.tied.get(name, name)
        if name not in self.made:
            values = numbers(sizes, salt_of(name), self.dtype)
            if len(sizes) == 2 and sizes[1] > 16:
                values = values * (8.0 / sizes[1])
            # Scales of norms are around 1.
            if name.endswith(".gain"):
                values = values * 0.2 + 1
            self.made[name] = nn.Parameter(values, requires_grad=name not in self.frozen)
        return self.made[name]


class Lin(nn.Module):
    def __init__(self, make, name, inputs, outputs):
        super().__init__()
        self.weight = make.parameter(name + ".weight", [outputs, inputs])
        self.bias = make.parameter(name + ".bias", [outputs])

    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias)


class Mlp(nn.Module):
    def __init__(self, make, name, width, hidden):
        super().__init__()
        self.a = Lin(make, name + ".a", width, hidden)
        self.b = Lin(make, name + ".b", hidden, width)

    def forward(self, x, rank, step):
        return x + self.b(torch.tanh(self.a(x)))


class Norm(nn.Module):
    def __init__(self, make, name, width):
        super().__init__()
        self.gain = make.parameter(name + ".gain", [width])
        self.shift = make.parameter(name + ".shift", [width])
        self.a = Lin(make, name + ".a", width, width)

    def forward(self, x, rank, step):
        return x + self.a(nn.functional.layer_norm(x, [x.shape[1]], self.gain, self.shift, 1e-5))


class Nested(nn.Module):
    def __init__(self, make, name, width, hidden):
        super().__init__()
        self.gain = make.parameter(name + ".gain", [width])
        self.inner = nn.ModuleList([Mlp(make, f"{name}.inner.{i}", width, h) for i, h in enumerate(hidden)])

    def forward(self, x, rank, step):
        x = x * self.gain
        for inner in self.inner:
            x = inner(x, rank, step)
        return x * self.gain


class Bare(nn.Module):
    """Its parameters are used by the model that has it: it has no forward pass."""

    def __init__(self, make, name, width):
        super().__init__()
        self.w = make.parameter(name + ".w", [width, width])
        self.gain = make.parameter(name + ".gain", [])


class Branch(nn.Module):
    """Ranks that use different parameters of a unit."""

    def __init__(self, make, name, width):
        super().__init__()
        self.left = Lin(make, name + ".left", width, width)
        self.right = Lin(make, name + ".right", width, width)

    def forward(self, x, rank, step):
        return x + torch.tanh((self.left if (rank + step) % 2 == 0 else self.right)(x))


class Memory(nn.Module):
    """A buffer that changes in each forward pass; all ranks have that of rank 0 after each exchange."""

    def __init__(self, make, name, width):
        super().__init__()
        self.register_buffer("seen", torch.zeros(width, dtype=make.dtype))
        self.a = Lin(make, name + ".a", width, width)

    def forward(self, x, rank, step):
        with torch.no_grad():
            self.seen.mul_(0.9).add_(x.mean(0), alpha=0.1)
        return x + self.a(x) + self.seen.clone()


class Net(nn.Module):
    def __init__(self, case):
        super().__init__()
        model, make = case["model"], Maker(case)
        width = model["width"]
        self.first = Lin(make, "first", model["in"], width)
        self.blocks = nn.ModuleList()
        for i, block in enumerate(model["blocks"]):
            name, kind = f"blocks.{i}", block["kind"]
            if kind == "mlp":
                self.blocks.append(Mlp(make, name, width, block["hidden"]))
            elif kind == "nested":
                self.blocks.append(Nested(make, name, width, block["hidden"]))
            else:
                self.blocks.append({"norm": Norm, "bare": Bare, "branch": Branch, "memory": Memory}[kind](make, name, width))
        self.head = Lin(make, "head", width, model["out"])

    def forward(self, x, order, rank, step):
        x = self.first(x)
        for i in order:
            block = self.blocks[i]
            x = torch.tanh(x @ block.w) * block.gain if isinstance(block, Bare) else block(x, rank, step)
        return self.head(x)


def groups_of(named, optimizer):
    """Parameters of one dimension or none have a group of their own."""
    rest = {"lr": optimizer["lr"], "weight_decay": optimizer["weight_decay"]}
    if optimizer["groups"] == "one":
        return [{"params": [p for _, p in named], **rest}]
    few = {"lr": optimizer["lr"] * 0.5, "weight_decay": 0.0}
    return [{"params": [p for _, p in named if p.dim() > 1], **rest}, {"params": [p for _, p in named if p.dim() <= 1], **few}]


def make_optimizer(named, o):
    groups = groups_of(named, o)
    kind = o["type"]
    if kind == "sgd":
        return torch.optim.SGD(groups, lr=o["lr"], momentum=o["momentum"], nesterov=o["nesterov"])
    if kind == "adagrad":
        return torch.optim.Adagrad(groups, lr=o["lr"], eps=1e-3, lr_decay=o["lr_decay"])
    if kind == "rmsprop":
        return torch.optim.RMSprop(groups, lr=o["lr"], eps=1e-3, momentum=o["momentum"], centered=True)
    return {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[kind](groups, lr=o["lr"], betas=(0.9, 0.99), eps=1e-3)


def rate(schedule, step):
    return max(0.1, 1 - step / schedule["total"])


def batch(case, step, forward, rank):
    dtype, model = DTYPES[case["dtype"]], case["model"]
    salt = step * 53 + forward * 71 + rank * 83
    return numbers([4, model["in"]], salt + 11, dtype) * 2, numbers([4, model["out"]], salt + 29, dtype)


def clipped(named, clip):
    return [p for n, p in named if clip["which"] == "all" or n.startswith(clip["which"])]


def sample(tensor):
    flat = tensor.detach().double().flatten()
    taken = flat[:: max(1, flat.numel() // SAMPLES)]
    return torch.cat([taken, flat.sum().reshape(1), flat.square().sum().reshape(1)])


class Copies:
    """A copy of the model for each rank, in one process; rank 0's has the optimizer."""

    def __init__(self, case):
        self.case = case
        self.nets = [Net(case) for _ in range(case["ranks"])]
        self.named = [list(net.named_parameters()) for net in self.nets]
        self.optimizer = make_optimizer(self.named[0], case["optimizer"])

    def ranks(self):
        return range(len(self.nets))

    def forward(self, rank, *args):
        return self.nets[rank](*args)

    def average(self):
        for same in zip(*self.named):
            grads = [p.grad for _, p in same]
            if all(g is None for g in grads):
                continue
            total = sum(torch.zeros_like(same[0][1]) if g is None else g for g in grads) / len(grads)
            for _, p in same:
                p.grad = total.clone()

    def spread(self):
        with torch.no_grad():
            for same in zip(*self.named):
                for _, p in same[1:]:
                    p.copy_(same[0][1])
        for net in self.nets[1:]:
            for own, first in zip(net.buffers(), self.nets[0].buffers()):
                own.copy_(first)

    def zero(self):
        for named in self.named:
            for _, p in named:
                p.grad = None


def train_copies(case):
    """The final state, and for each optimizer step the norm and the rates."""
    job = Copies(case)
    n, clip, schedule = case["accumulation"], case["clip"], case["schedule"]
    base = [g["lr"] for g in job.optimizer.param_groups]
    norms, losses, updates = [], [], 0
    for s, step in enumerate(case["steps"]):
        for rank in job.ranks():
            for name, p in job.named[rank]:
                if name in step["freeze"]:
                    p.requires_grad_(False)
                if name in step["thaw"]:
                    p.requires_grad_(True)
            outs, total = [], 0.0
            for f, order in enumerate(step["orders"]):
                x, y = batch(case, s, f, rank)
                loss = (job.forward(rank, x, order, rank, s) - y).square().mean()
                total += loss.item()
                if step["backward"] == "turn":
                    (loss / n).backward()
                else:
                    outs.append(loss)
            if step["backward"] == "sum":
                (sum(outs) / n).backward()
            elif step["backward"] == "each":
                for loss in outs:
                    (loss / n).backward()
            if rank == 0:
                losses.append(total)
        if (s + 1) % n == 0:
            job.average()
            if clip is not None and clip["kind"] == "norm":
                norms.append(nn.utils.clip_grad_norm_(clipped(job.named[0], clip), clip["max"], norm_type=float(clip["type"])).item())
            elif clip is not None:
                nn.utils.clip_grad_value_(clipped(job.named[0], clip), clip["max"])
            job.optimizer.step()
            updates += 1
            if schedule is not None:
                for group, lr in zip(job.optimizer.param_groups, base):
                    group["lr"] = lr * rate(schedule, updates)
            job.zero()
            job.spread()
        if step["eval"]:
            with torch.no_grad():
                x, _ = batch(case, s, 7, 0)
                losses.append(job.forward(0, x, step["orders"][0], 0, s).square().mean().item())
    state = {name: sample(p) for name, p in job.named[0]}
    state.update({name: sample(b) for name, b in job.nets[0].named_buffers()})
    return state, norms, losses


def draw_case(draw, index):
    ranks = [2, 4, 3, 2, 4, 1, 3, 4][index % 8]
    big = index % 8 < 2  # parts of a unit that ranks share in memory
    width = 48 if big else draw.randint(2, 7)
    hidden = (lambda: 360 * ranks) if big else (lambda: draw.randint(1, 9))
    accumulation = draw.choice([1, 1, 2, 3])
    kinds = ["mlp", "mlp", "norm", "nested", "bare", "branch"]
    # The rank whose buffer counts in the middle of a window is not the same everywhere.
    simple = draw.random() < 0.3
    if simple:
        accumulation = 1
        kinds.append("memory")
    blocks = []
    for _ in range(draw.randint(1, 5)):
        kind = draw.choice(kinds)
        block = {"kind": kind}
        if kind == "mlp":
            block["hidden"] = hidden()
        if kind == "nested":
            block["hidden"] = [hidden() for _ in range(draw.randint(1, 2))]
        blocks.append(block)
    if big:
        blocks.append({"kind": "mlp", "hidden": hidden()})
    names = {"mlp": ["a.weight", "a.bias", "b.weight", "b.bias"], "norm": ["gain", "shift", "a.weight", "a.bias"], "bare": ["w", "gain"],
             "branch": ["left.weight", "right.bias"], "memory": ["a.weight"], "nested": ["gain", "inner.0.a.weight", "inner.0.b.bias"]}
    all_names = [f"blocks.{i}.{n}" for i, b in enumerate(blocks) for n in names[b["kind"]]] + ["first.weight", "first.bias", "head.bias"]
    tied = []
    mlps = [i for i, b in enumerate(blocks) if b["kind"] == "mlp"]
    if len(mlps) > 1 and draw.random() < 0.7:
        a, b = draw.sample(mlps, 2)
        blocks[max(a, b)]["hidden"] = blocks[min(a, b)]["hidden"]
        tied = [[f"blocks.{max(a, b)}.{n}", f"blocks.{min(a, b)}.{n}"] for n in draw.choice([["a.weight"], ["a.weight", "a.bias", "b.weight"], ["b.bias"]])]
    squares = [i for i, b in enumerate(blocks) if b["kind"] in ("norm", "memory")]
    if len(squares) > 1 and draw.random() < 0.7:
        tied.append([f"blocks.{squares[-1]}.a.weight", f"blocks.{squares[0]}.a.weight"])
    second = {name for name, _ in tied}
    frozen = sorted(n for n in draw.sample(all_names, draw.choice([0, 0, 1, 2])) if n not in second)
    optimizer = {"type": draw.choice(["sgd", "sgd", "adam", "adamw", "adagrad", "rmsprop"]), "lr": draw.choice([0.02, 0.05]) / (40 if big else 1),
                 "weight_decay": draw.choice([0, 0.1]), "momentum": draw.choice([0, 0.9]), "nesterov": False, "lr_decay": draw.choice([0, 0.1]),
                 "groups": draw.choice(["one", "dims"]), "fused": draw.random() < 0.6}
    if optimizer["type"] == "sgd" and optimizer["momentum"] > 0:
        optimizer["nesterov"] = draw.random() < 0.5
    clip = draw.choice([None, None, {"kind": "value", "max": 0.01, "which": "all"}] + [
        {"kind": "norm", "type": t, "max": draw.choice([0.05, 0.5, 50]), "which": draw.choice(["all", "all", "blocks.0", "head", "first.weight"])}
        for t in ("1", "2", "2", "inf", "3")])
    steps = []
    order = [i for i in range(len(blocks)) if len(blocks) == 1 or draw.random() < 0.85]
    toggled = None
    for s in range(draw.randint(2, 3) * accumulation * (1 if big else 2)):
        forwards = 1 if simple else draw.choice([1, 1, 1, 2, 3])
        orders = []
        for _ in range(forwards):
            if draw.random() < 0.25:
                order = [i for i in range(len(blocks)) if draw.random() < 0.8]
                if draw.random() < 0.3:
                    order = order + order[:1]
            orders.append(list(order))
        step = {"orders": orders, "backward": draw.choice(["sum", "turn", "each"]) if forwards > 1 else "sum", "eval": not simple and draw.random() < 0.2,
                "freeze": [], "thaw": []}
        if s % accumulation == 0 and not simple and draw.random() < 0.15:
            if toggled is None:
                free = [n for n in all_names if n not in frozen and n not in second]
                toggled = draw.choice(free)
                step["freeze"] = [toggled]
            else:
                step["thaw"], toggled = [toggled], None
        steps.append(step)
    return {"id": f"p{index:03}", "ranks": ranks, "dtype": "float64" if draw.random() < 0.8 or big else "float32",
            "model": {"in": draw.randint(2, 5), "out": draw.randint(1, 3), "width": width, "blocks": blocks, "tied": tied, "frozen": frozen},
            "optimizer": optimizer, "schedule": {"total": 12} if draw.random() < 0.5 else None, "accumulation": accumulation,
            "sync_each_batch": draw.random() < 0.3, "clip": clip, "steps": steps}


def main(count, seed, out):
    draw = random.Random(seed)
    want, lines = {}, []
    for index in range(count):
        case = draw_case(draw, index)
        state, norms, losses = train_copies(case)
        # A run that diverges proves nothing.
        if not all(torch.isfinite(v).all() for v in state.values()) or max(losses) > 100:
            continue
        case["norms"], case["losses"] = norms, losses
        lines.append(json.dumps(case, separators=(",", ":")))
        want.update({f"{case['id']}/{name}": value for name, value in state.items()})
    with open(os.path.join(out, "cases.jsonl"), "w") as file:
        file.write("\n".join(lines) + "\n")
    save_file(want, os.path.join(out, "want.safetensors"))


def train_rank(case, rank, engine):
    """On one of two real ranks; None for what the engine does not support. The final state and the norms."""
    from accelerate import Accelerator, DistributedDataParallelKwargs
    from accelerate.state import AcceleratorState, GradientState
    from accelerate.utils import GradientAccumulationPlugin

    n, clip = case["accumulation"], case["clip"]
    kinds = {b["kind"] for b in case["model"]["blocks"]}
    if any(s["freeze"] or s["thaw"] or s["backward"] == "each" for s in case["steps"]):
        return None
    net = Net(case)
    if engine == "ddp":
        if any(len(s["orders"]) > 1 for s in case["steps"]):
            return None
        AcceleratorState._reset_state()
        GradientState._reset_state()
        accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=n, sync_each_batch=case["sync_each_batch"]),
            kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
        )
        optimizer = make_optimizer(list(net.named_parameters()), case["optimizer"])
        model, optimizer = accelerator.prepare(net, optimizer)
    else:
        # No shards of single numbers, nor gradients on one rank only; a module that is not called is not gathered.
        if kinds & {"bare", "branch", "memory"} or case["model"]["tied"]:
            return None
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (2,))
        for block in net.blocks:
            for inner in getattr(block, "inner", []):
                fully_shard(inner, mesh=mesh)
            fully_shard(block, mesh=mesh)
        fully_shard(net, mesh=mesh)
        model, optimizer = net, make_optimizer(list(net.named_parameters()), case["optimizer"])
    named = list(net.named_parameters())
    base = [g["lr"] for g in optimizer.param_groups]
    norms, updates = [], 0

    def backward(loss):
        accelerator.backward(loss) if engine == "ddp" else (loss / n).backward()

    for s, step in enumerate(case["steps"]):
        sync = (s + 1) % n == 0
        if engine == "fsdp2":
            model.set_requires_gradient_sync(sync)
        with accelerator.accumulate(model) if engine == "ddp" else nullcontext():
            losses = []
            for f, order in enumerate(step["orders"]):
                x, y = batch(case, s, f, rank)
                losses.append((model(x, order, rank, s) - y).square().mean())
                if step["backward"] == "turn":
                    backward(losses[-1])
            if step["backward"] == "sum":
                backward(sum(losses))
            if sync:
                clip_norm = accelerator.clip_grad_norm_ if engine == "ddp" else nn.utils.clip_grad_norm_
                clip_value = accelerator.clip_grad_value_ if engine == "ddp" else nn.utils.clip_grad_value_
                if clip is not None and clip["kind"] == "norm":
                    norm = clip_norm(clipped(named, clip), clip["max"], norm_type=float(clip["type"]))
                    norms.append((norm.full_tensor() if hasattr(norm, "full_tensor") else norm).item())
                elif clip is not None:
                    clip_value(clipped(named, clip), clip["max"])
            if engine == "ddp" or sync:
                optimizer.step()
            if sync and case["schedule"] is not None:
                updates += 1
                for group, lr in zip(optimizer.param_groups, base):
                    group["lr"] = lr * rate(case["schedule"], updates)
            if engine == "ddp" or sync:
                optimizer.zero_grad()
    state = {name: sample(p.full_tensor() if hasattr(p, "full_tensor") else p) for name, p in named}
    state.update({name: sample(b) for name, b in net.named_buffers()})
    return state, norms


def check_rank(rank, port):
    torch.set_num_threads(1)
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
                       "MASTER_PORT": str(port), "ACCELERATE_USE_CPU": "true", "CCL_WORKER_COUNT": "0"})
    torch.distributed.init_process_group("gloo")
    want = load_file(os.path.join(os.environ.get("OUT", HERE), "want.safetensors"))
    for line in open(os.path.join(os.environ.get("OUT", HERE), "cases.jsonl")):
        case = json.loads(line)
        if case["ranks"] != 2 or case["dtype"] != "float64":
            continue
        for engine in ("ddp", "fsdp2"):
            result = train_rank(case, rank, engine)
            if result is None or rank != 0:
                continue
            state, norms = result
            mine = {k[len(case["id"]) + 1:]: v for k, v in want.items() if k.startswith(case["id"] + "/")}
            off = max(((state[k] - v).abs() / (1 + v.abs())).max().item() for k, v in mine.items())
            norm_off = max([abs(a - b) / (1 + b) for a, b in zip(norms, case["norms"])], default=0)
            print(f"{'ok  ' if max(off, norm_off) < 1e-9 else 'FAIL'} {case['id']} {engine} {off:.1e} {norm_off:.1e}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "--check" in sys.argv:
        torch.multiprocessing.spawn(check_rank, args=(29517,), nprocs=2)
        sys.exit(0)
    main(int(os.environ.get("CASES", "26")), int(os.environ.get("SEED", "15")), os.environ.get("OUT", HERE))
