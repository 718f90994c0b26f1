"""Records how Accelerate (1.15.0, PyTorch 2.11.0, Gloo) trains on four processes: more cases of the kind `training` (../README.md).

usage: python3 make.py              writes cases.jsonl and training/
       python3 make.py --check      trains the cases of ../golden with several processes (float32, constant rate), and compares
"""

import json
import math
import os
import socket
import sys
import tempfile

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import nn

HERE = os.path.dirname(os.path.abspath(__file__))

CASES = [
    {
        "name": "decoder_adamw_accum_4", "num_processes": 4,
        "model": {"type": "decoder", "vocab": 32, "context": 12, "hidden": 24, "heads": 3, "layers": 3, "tie_head": True},
        "loss": "cross_entropy", "batch_size": 2, "epochs": 2, "gradient_accumulation_steps": 2, "clip_norm": 1.0,
        "optimizer": {"type": "adamw", "lr": 0.003, "betas": [0.9, 0.999], "eps": 1e-08, "weight_decay": 0.01},
        "scheduler": None, "mixed_precision": "no", "split_batches": False, "even_batches": True, "drop_last": False,
        "dataset_len": 51,
    },
    {
        "name": "mlp_sgd_4", "num_processes": 4,
        "model": {"type": "sequential", "layers": [
            {"layer": "linear", "in": 6, "out": 16}, {"layer": "tanh"}, {"layer": "linear", "in": 16, "out": 12},
            {"layer": "layernorm", "size": 12}, {"layer": "gelu"}, {"layer": "linear", "in": 12, "out": 3}]},
        "loss": "mse", "batch_size": 3, "epochs": 3, "gradient_accumulation_steps": 1, "clip_norm": None,
        "optimizer": {"type": "sgd", "lr": 0.1, "momentum": 0.9, "nesterov": True},
        "scheduler": None, "mixed_precision": "no", "split_batches": False, "even_batches": True, "drop_last": False,
        "dataset_len": 60,
    },
]


class Block(nn.Module):
    def __init__(self, hidden, heads):
        super().__init__()
        self.heads = heads
        self.ln1 = nn.LayerNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.proj = nn.Linear(hidden, hidden)
        self.ln2 = nn.LayerNorm(hidden)
        self.fc = nn.Linear(hidden, 4 * hidden)
        self.out = nn.Linear(4 * hidden, hidden)

    def attend(self, x):
        batch, length, hidden = x.shape
        q, k, v = (t.view(batch, length, self.heads, -1).transpose(1, 2) for t in self.qkv(x).split(hidden, 2))
        scores = q @ k.transpose(-2, -1) / math.sqrt(hidden // self.heads)
        scores = scores.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), float("-inf"))
        return (scores.softmax(-1) @ v).transpose(1, 2).reshape(batch, length, hidden)

    def forward(self, x):
        x = x + self.proj(self.attend(self.ln1(x)))
        return x + self.out(F.gelu(self.fc(self.ln2(x))))


class Decoder(nn.Module):
    def __init__(self, m):
        super().__init__()
        self.tok = nn.Embedding(m["vocab"], m["hidden"])
        self.pos = nn.Embedding(m["context"], m["hidden"])
        self.blocks = nn.ModuleList(Block(m["hidden"], m["heads"]) for _ in range(m["layers"]))
        self.ln_f = nn.LayerNorm(m["hidden"])
        self.head = None if m["tie_head"] else nn.Linear(m["hidden"], m["vocab"], bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        x = self.ln_f(x)
        return F.linear(x, self.tok.weight) if self.head is None else self.head(x)


class Sequential(nn.Module):
    def __init__(self, layers):
        super().__init__()
        make = {
            "linear": lambda l: nn.Linear(l["in"], l["out"], bias=l.get("bias", True)),
            "conv2d": lambda l: nn.Conv2d(l["in"], l["out"], l["kernel"], padding=l.get("padding", 0), stride=l.get("stride", 1)),
            "maxpool2d": lambda l: nn.MaxPool2d(l["kernel"]),
            "groupnorm": lambda l: nn.GroupNorm(l["groups"], l["channels"]),
            "layernorm": lambda l: nn.LayerNorm(l["size"]),
            "flatten": lambda l: nn.Flatten(), "relu": lambda l: nn.ReLU(), "tanh": lambda l: nn.Tanh(), "gelu": lambda l: nn.GELU(),
        }
        self.net = nn.Sequential(*(make[layer["layer"]](layer) for layer in layers))

    def forward(self, x):
        return self.net(x)


def model_of(case):
    m = case["model"]
    return Decoder(m) if m["type"] == "decoder" else Sequential(m["layers"])


def optimizer_of(case, parameters):
    o = dict(case["optimizer"])
    return {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW}[o.pop("type")](parameters, **o)


def loss_of(case, out, y):
    if case["loss"] == "mse":
        return F.mse_loss(out, y)
    return F.cross_entropy(out.reshape(-1, out.shape[-1]), y.reshape(-1))


def train(rank, case, root, port, result):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), LOCAL_RANK=str(rank),
                      WORLD_SIZE=str(case["num_processes"]), ACCELERATE_USE_CPU="true")
    torch.set_num_threads(1)
    from accelerate import Accelerator
    from accelerate.utils import DataLoaderConfiguration, gather_object
    from torch.utils.data import DataLoader, TensorDataset

    accelerator = Accelerator(
        cpu=True, gradient_accumulation_steps=case["gradient_accumulation_steps"],
        dataloader_config=DataLoaderConfiguration(split_batches=case["split_batches"], even_batches=case["even_batches"]))
    model = model_of(case)
    model.load_state_dict(load_file(os.path.join(root, case["initial_weights"])))
    data = load_file(os.path.join(root, case["data"]))
    loader = DataLoader(TensorDataset(data["x"], data["y"]), batch_size=case["batch_size"], drop_last=case["drop_last"])
    model, optimizer, loader = accelerator.prepare(model, optimizer_of(case, model.parameters()), loader)
    out = {"loss": [], "sync": [], "grad_norm": [], "lr": []}
    for _ in range(case["epochs"]):
        for x, y in loader:
            with accelerator.accumulate(model):
                out["lr"].append(optimizer.param_groups[0]["lr"])
                out["sync"].append(accelerator.sync_gradients)
                loss = loss_of(case, model(x), y)
                out["loss"].append(loss.item())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    limit = math.inf if case["clip_norm"] is None else case["clip_norm"]
                    out["grad_norm"].append(accelerator.clip_grad_norm_(model.parameters(), limit).item())
                optimizer.step()
                optimizer.zero_grad()
    out["final_lr"] = optimizer.param_groups[0]["lr"]
    out["loss"] = gather_object([out["loss"]])
    if rank == 0:
        weights = {k: v.detach().clone().contiguous() for k, v in accelerator.unwrap_model(model).state_dict().items()}
        save_file(weights, result + ".safetensors")
        with open(result, "w") as f:
            json.dump(out, f)
    accelerator.end_training()


def run(case, root):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        result = os.path.join(folder, "result")
        mp.spawn(train, (case, root, port, result), nprocs=case["num_processes"])
        with open(result) as f:
            return json.load(f), load_file(result + ".safetensors")


def apart(a, b):
    return max((a[k] - b[k]).abs().max().item() for k in a)


def rounded(value):
    return [rounded(v) for v in value] if isinstance(value, list) else float("%.8g" % value)


def make():
    os.makedirs(os.path.join(HERE, "training"), exist_ok=True)
    lines = []
    for number, case in enumerate(CASES):
        torch.manual_seed(100 + number)
        name = "training/" + case["name"]
        n = case["dataset_len"]
        if case["model"]["type"] == "decoder":
            ids = torch.randint(case["model"]["vocab"], (n, case["model"]["context"] + 1))
            data = {"x": ids[:, :-1].contiguous(), "y": ids[:, 1:].contiguous()}
        else:
            data = {"x": torch.randn(n, case["model"]["layers"][0]["in"]), "y": torch.randn(n, case["model"]["layers"][-1]["out"])}
        initial = {k: v.detach().clone() for k, v in model_of(case).state_dict().items()}
        for key, value in initial.items():  # norms are not the identity
            if key.split(".")[-2] in ("ln1", "ln2", "ln_f"):
                value.add_(0.1 * torch.randn_like(value))
        case = dict(case, initial_weights=name + ".initial.safetensors", data=name + ".data.safetensors")
        save_file(data, os.path.join(HERE, case["data"]))
        save_file(initial, os.path.join(HERE, case["initial_weights"]))
        out, weights = run(case, HERE)
        again, weights_again = run(case, HERE)
        assert out == again, "two runs differ"
        save_file(weights, os.path.join(HERE, name + ".final.safetensors"))
        out = {
            "loss": rounded(out["loss"]), "sync": out["sync"], "grad_norm": rounded(out["grad_norm"]), "lr": out["lr"],
            "final_lr": out["final_lr"], "final_weights": name + ".final.safetensors",
            "same_run_twice_differs_by": apart(weights, weights_again),
            "tolerance": {"loss": 2e-05, "grad_norm": 2e-05, "weights": 2e-05, "update": 0.001},
        }
        lines.append(json.dumps({"id": "training/p%04d" % (number + 1), "kind": "training", "in": case, "out": out}, separators=(",", ":")))
    with open(os.path.join(HERE, "cases.jsonl"), "w") as f:
        f.write("\n".join(lines) + "\n")


def check():
    root = os.path.join(HERE, "..", "golden")
    with open(os.path.join(root, "training.jsonl")) as f:
        for line in f:
            parsed = json.loads(line)
            case, want = parsed["in"], parsed["out"]
            if case["num_processes"] == 1 or case["scheduler"] is not None or case["mixed_precision"] != "no":
                continue
            got, weights = run(case, root)
            assert got["sync"] == want["sync"], case["name"]
            loss = (torch.tensor(got["loss"]) - torch.tensor(want["loss"])).abs().max().item()
            print("%s: losses differ by %.1e, weights by %.1e" % (
                case["name"], loss, apart(weights, load_file(os.path.join(root, want["final_weights"])))))


if __name__ == "__main__":
    check() if sys.argv[1:] == ["--check"] else make()
