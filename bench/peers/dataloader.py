"""The peer of bench/dataloader: samples per second of torch.utils.data over token blocks. Prints one JSON line."""

import json
import statistics
import sys
import time

import torch


class Tokens(torch.utils.data.Dataset):
    """Blocks of `length` tokens cut out of one long tensor of uint16, as language-model loaders do."""

    def __init__(self, tokens, length):
        self.tokens, self.length = tokens, length

    def __len__(self):
        return (self.tokens.numel() - 1) // self.length

    def __getitem__(self, i):
        block = self.tokens[i * self.length : (i + 1) * self.length + 1].to(torch.int64)
        return block[:-1], block[1:]


def main():
    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    torch.set_num_threads(1)
    tokens = torch.randint(0, 50000, (1024 * 4096 + 1,), dtype=torch.int32).to(torch.uint16)
    data = Tokens(tokens, 1024)
    rates = []
    for i in range(6):
        loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True, num_workers=workers)
        seen = 0
        start = time.perf_counter()
        for x, _ in loader:
            seen += x.shape[0]
        if i:
            rates.append(seen / (time.perf_counter() - start))
    print(json.dumps({"bench": "dataloader_torch", "workers": workers,
                      "samples_per_s": round(statistics.median(rates))}))


main()
