"""usage: generate.py --model DIR [--device cuda:N] [--batch N,N] [--prompt_tokens N] [--new_tokens N] [--rounds N]
[--dtype float32|bfloat16]

What bench/generate measures, with transformers' generate(). Prints the same lines.
"""

import argparse
import json
import os
import resource
import statistics
import time

import torch
from transformers import AutoModelForCausalLM

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True)
parser.add_argument("--device", default="cpu")
parser.add_argument("--batch", default="1")
parser.add_argument("--prompt_tokens", type=int, default=32)
parser.add_argument("--new_tokens", type=int, default=64)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--dtype", default="float32")
flags = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=getattr(torch, flags.dtype)).to(flags.device)
model.generation_config.pad_token_id = 0
model.generation_config.eos_token_id = None
print("loaded", flush=True)
first = True
for batch in (int(part) for part in flags.batch.split(",")):
    prompt = (torch.arange(batch * flags.prompt_tokens) * 7919 % 1000).view(batch, -1).to(flags.device)

    def generate(count):
        out = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False)
        return out[:, flags.prompt_tokens:].cpu()

    generate(1)
    if first:
        print("first token", flush=True)
        first = False
    rates = []
    for _ in range(flags.rounds):
        begin = time.perf_counter()
        tokens = generate(flags.new_tokens)
        rates.append(batch * flags.new_tokens / (time.perf_counter() - begin))
    assert tokens.shape[1] == flags.new_tokens, tokens.shape
    print(json.dumps({
        "bench": "generate", "device": flags.device, "batch": batch, "dtype": flags.dtype,
        "tokens_per_s": round(statistics.median(rates), 2), "fastest_tokens_per_s": round(max(rates), 2),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024, "tokens": tokens[0, :16].tolist(),
        "load": round(os.getloadavg()[0], 2)}), flush=True)
