"""usage: python bench/peers/dataloader.py [--workers N] [--rounds N] [--passes N] [--in_memory]

The peer of bench/dataloader: samples per second of torch.utils.data over the same kind of file, mapped, or with --in_memory a
copy of it. Workers stay between passes, and the first pass does not count. Prints one JSON line.
"""

import argparse
import json
import os
import statistics
import tempfile
import time

import torch

BLOCK, BLOCKS = 1024, 4096


class Tokens(torch.utils.data.Dataset):
    """Blocks of tokens cut out of one long tensor of uint16, as language-model loaders do."""

    def __init__(self, tokens):
        self.tokens = tokens

    def __len__(self):
        return (self.tokens.numel() - 1) // BLOCK

    def __getitem__(self, i):
        block = self.tokens[i * BLOCK : (i + 1) * BLOCK + 1].to(torch.int64)
        return block[:-1], block[1:]


def token_file():
    """A mapped file of tokens, which is gone at the end of the program."""
    tokens = torch.randint(0, 50000, (BLOCK * BLOCKS + 1,), dtype=torch.int32).to(torch.uint16)
    with tempfile.NamedTemporaryFile() as file:
        torch.from_file(file.name, shared=True, size=tokens.numel(), dtype=torch.uint16).copy_(tokens)
        return torch.from_file(file.name, size=tokens.numel(), dtype=torch.uint16)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--passes", type=int, default=100, help="over the file in each round")
    parser.add_argument("--in_memory", action="store_true")
    flags = parser.parse_args()
    torch.set_num_threads(1)
    tokens = token_file()
    data = Tokens(tokens.clone() if flags.in_memory else tokens)
    loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True, num_workers=flags.workers,
                                         persistent_workers=flags.workers > 0)
    for _ in loader:  # starts the workers
        pass
    rates = []
    for _ in range(flags.rounds):
        seen = 0
        start = time.perf_counter()
        for _ in range(flags.passes):
            for x, _ in loader:
                seen += x.shape[0]
        rates.append(seen / (time.perf_counter() - start))
    print(json.dumps({"bench": "dataloader_torch", "workers": flags.workers, "mapped": not flags.in_memory,
                      "samples_per_s": round(statistics.median(rates)), "load": round(os.getloadavg()[0], 2)}))


main()
