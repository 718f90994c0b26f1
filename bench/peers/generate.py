"""usage: generate.py --model DIR [--batch N] [--prompt_tokens N] [--new_tokens N] [--rounds N] [--dtype float32|bfloat16]

What bench/generate measures, with transformers' generate(). Prints the same JSON line.
"""

import time

start = time.perf_counter()

import argparse  # noqa: E402
import json  # noqa: E402
import resource  # noqa: E402

import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", required=True)
parser.add_argument("--batch", type=int, default=1)
parser.add_argument("--prompt_tokens", type=int, default=32)
parser.add_argument("--new_tokens", type=int, default=64)
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--dtype", default="float32")
flags = parser.parse_args()

model = AutoModelForCausalLM.from_pretrained(flags.model, dtype=getattr(torch, flags.dtype))
model.generation_config.pad_token_id = 0
load = time.perf_counter() - start
prompt = (torch.arange(flags.batch * flags.prompt_tokens) * 7919 % 1000).view(flags.batch, -1)


def generate(count):
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=count, do_sample=False)


generate(1)
first = time.perf_counter() - start
best = 0
for _ in range(flags.rounds):
    begin = time.perf_counter()
    generate(flags.new_tokens)
    best = max(best, flags.batch * flags.new_tokens / (time.perf_counter() - begin))
print(json.dumps({
    "bench": "generate", "batch": flags.batch, "dtype": flags.dtype, "tokens_per_s": round(best, 2), "load_s": round(load, 3),
    "first_token_s": round(first, 3), "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024}))
