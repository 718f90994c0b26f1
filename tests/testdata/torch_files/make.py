"""Makes the files beside it. Needs torch, numpy and safetensors (README.md names the versions); tests do not run it.

    python3 make.py FOLDER
"""

import os
import pickle
import sys
import warnings
import zipfile
from collections import OrderedDict

import torch
from safetensors.torch import save_file

warnings.filterwarnings("ignore")


def values(count, dtype, start=0):
    if dtype == torch.bool:
        return torch.arange(start, start + count) % 3 == 0
    return (torch.arange(start, start + count, dtype=torch.float32) - 2).abs().to(dtype)


def every_type():
    types = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
             torch.int8, torch.uint8, torch.bool, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn,
             torch.float8_e5m2, torch.complex64]
    return OrderedDict((str(t).split(".")[1], values(6, t).reshape(2, 3)) for t in types)


def layouts():
    base = values(24, torch.float32)
    return OrderedDict(
        whole=base.reshape(4, 6), row=base[6:12], transposed=base.reshape(4, 6).t(), column=base.reshape(4, 6)[:, 2],
        step=base[1::3], block=base.reshape(4, 6)[1:3, 2:5], permuted=base.reshape(2, 3, 4).permute(2, 0, 1),
        expanded=base[3:5].reshape(2, 1).expand(2, 3), scalar=torch.tensor(2.5), empty=torch.zeros(0, 3),
        one=base[5:6].reshape(1, 1, 1))


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.norm = torch.nn.BatchNorm1d(3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def plain_copy(tensors):
    return {name: tensor.detach().clone().contiguous() for name, tensor in tensors.items()}


def rewrite(source, target, change):
    """Copies a zip archive member by member; change(name, bytes) gives the new bytes, or None to leave it out."""
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as new:
        for info in old.infolist():
            data = change(info.filename, old.read(info))
            if data is not None:
                new.writestr(info.filename, data)


class Evil:
    def __reduce__(self):
        return (os.system, ("echo executed > pwned",))


def main(folder):
    os.makedirs(folder, exist_ok=True)
    os.chdir(folder)
    torch.manual_seed(0)
    for name, tensors in {"types": every_type(), "layouts": layouts()}.items():
        torch.save(tensors, name + ".bin")
        save_file(plain_copy(tensors), name + ".safetensors")
    torch.save(every_type(), "types_protocol4.bin", pickle_protocol=4)

    model = Tied()
    torch.save(model.state_dict(), "pytorch_model.bin")
    save_file(plain_copy(model.state_dict()), "pytorch_model.safetensors")
    torch.save({"epoch": 3, "lr": 1e-3, "name": "run", "shape": torch.Size([2, 3]), "seeds": {1, 2}, "big": 1 << 90,
                "blob": b"bytes", "device": torch.device("cpu"), "state_dict": model.state_dict(),
                "parameter": torch.nn.Parameter(values(3, torch.float32)),
                "optimizer": {"state": {0: {"step": torch.tensor(4.0)}}, "param_groups": [{"params": [0, 1]}]}},
               "nested.pt")

    torch.save(model.state_dict(), "legacy.bin", _use_new_zipfile_serialization=False)
    torch.jit.script(torch.nn.Linear(1, 1)).save("torchscript.pt")
    torch.save({"weight": Evil()}, "evil.bin")
    torch.save({"weight": torch.zeros(2, 2).to_sparse()}, "sparse.bin")
    torch.save({"weight": torch.nn.Linear(1, 1)}, "module.bin")
    torch.save({"w": torch.ones(1).expand(1 << 50)}, "expanded.bin")
    with open("plain.pkl", "wb") as file:
        pickle.dump({"weight": [1.0, 2.0]}, file, protocol=4)
    order = lambda name, data: b"big" if name.endswith("/byteorder") else data
    rewrite("layouts.bin", "big_endian.bin", order)
    rewrite("layouts.bin", "missing_storage.bin", lambda name, data: None if name.endswith("/data/0") else data)
    rewrite("layouts.bin", "short_storage.bin", lambda name, data: data[:-4] if name.endswith("/data/0") else data)
    with zipfile.ZipFile("other.zip", "w", zipfile.ZIP_STORED) as other:
        other.writestr("readme.txt", "not of torch.save")
    with zipfile.ZipFile("layouts.bin") as old, zipfile.ZipFile("compressed.bin", "w", zipfile.ZIP_DEFLATED) as new:
        for info in old.infolist():
            new.writestr(info.filename, old.read(info))


if __name__ == "__main__":
    main(sys.argv[1])
