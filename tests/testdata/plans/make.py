#!/usr/bin/env python3
"""usage: [SEED=N] [COUNT=N] [OUT=FILE] python make.py

Writes cases.jsonl: what Accelerate 1.15.0 says of models of transformers 5.17.0 whose config.json is put together at random: total and largest layer (calculate_maximum_sizes, as
`accelerate estimate-memory` prints them), and device maps (get_balanced_memory, infer_auto_device_map) for limits at random. README.md has the format.
"""

import json
import os
import random
import tempfile
import warnings

import torch
import transformers
from accelerate.utils import calculate_maximum_sizes, compute_module_sizes, get_balanced_memory, get_max_memory, infer_auto_device_map
from safetensors import safe_open

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

HERE = os.path.dirname(os.path.abspath(__file__))
FAMILIES = ["LlamaForCausalLM", "MistralForCausalLM", "MixtralForCausalLM", "Qwen2ForCausalLM", "GPT2LMHeadModel", "BertForMaskedLM", "BertForSequenceClassification"]


def config_of(rng, architecture):
    heads = rng.choice([1, 2, 4])
    width, layers, vocab = heads * rng.choice([4, 6, 8]), rng.choice([1, 2, 3, 5]), rng.choice([23, 101, 400])
    inner = rng.choice([width, 2 * width, 4 * width + 1])
    out = {"architectures": [architecture], "tie_word_embeddings": rng.random() < 0.5, "vocab_size": vocab}
    if architecture == "GPT2LMHeadModel":
        return dict(out, model_type="gpt2", n_embd=width, n_head=heads, n_layer=layers, n_inner=rng.choice([None, inner]), n_positions=rng.choice([8, 64]))
    out.update(hidden_size=width, num_attention_heads=heads, num_hidden_layers=layers, intermediate_size=inner, max_position_embeddings=64)
    if architecture.startswith("Bert"):
        return dict(out, model_type="bert", type_vocab_size=rng.choice([1, 2]), id2label={str(i): str(i) for i in range(rng.choice([1, 2, 3]))})
    out.update(model_type=architecture.split("For")[0].lower(), num_key_value_heads=rng.choice([k for k in (1, 2, 4) if heads % k == 0]))
    if out["model_type"] == "llama":
        out.update(attention_bias=rng.random() < 0.5, mlp_bias=rng.random() < 0.5)
    if out["model_type"] == "mixtral":
        out.update(num_local_experts=rng.choice([1, 2, 4]), num_experts_per_tok=1)
        if rng.random() < 0.5:  # The mean module is larger than a layer, and decides what GPUs share.
            out.update(num_hidden_layers=1, vocab_size=4000, num_local_experts=4)
    return out


def without_tables(model):
    """Buffers that are computed and that no file has: Muster's models have none."""
    for module in model.modules():
        for name in list(module._non_persistent_buffers_set):
            del module._buffers[name]
            module._non_persistent_buffers_set.discard(name)
    return model


def plan(rng, model, stored, splits):
    kind = rng.choice(["auto", "balanced", "balanced_low_0", "sequential"])
    dtype = rng.choice([None, "float16"] if stored == "float32" else [None])
    whole = rng.random() < 0.7 or not splits
    classes = sorted(model._no_split_modules) if whole else []
    sizes = compute_module_sizes(model, dtype=dtype)
    total = sizes[""]
    undivided = [sizes.get(name, 0) for name, module in model.named_modules() if name and type(module).__name__ in classes]
    undivided += [p.numel() * (2 if dtype else p.element_size()) for p in model.parameters()]
    limits = {i: int(total * rng.uniform(0.1, 1.3)) for i in range(rng.choice([0, 1, 1, 2, 3]))}
    if not limits or rng.random() < 0.7:
        limits["cpu"] = int(total * rng.uniform(0.1, 1.3))
    if max(limits.values()) < max(undivided):
        return None  # Muster says so, Accelerate leaves it to the disk.
    # Written as a person does; both take 1.009KB, which no double has exactly, for 1008 bytes.
    written = {device: "%d.%03dKB" % (limit // 1000, limit % 1000) for device, limit in limits.items()}
    args = ["--max_memory", ",".join("%s=%s" % each for each in written.items()), "--device_map", kind]
    args += ["--dtype", dtype] * bool(dtype) + ["--no_split", "none"] * (not whole)
    given = get_max_memory(written)
    if kind != "sequential":
        given = get_balanced_memory(model, given, no_split_module_classes=classes, dtype=dtype, low_zero=kind == "balanced_low_0")
    try:
        found = infer_auto_device_map(model, given, no_split_module_classes=classes, dtype=dtype)
    except IndexError:
        return None  # Accelerate finds no owner of a tied parameter that is no module's below (BERT's cls.predictions.bias).
    return {"args": args, "limits": {str(device): int(limit) for device, limit in given.items()}, "bytes": total, "map": {name: str(device) for name, device in found.items()}}


def case(rng, name, architecture):
    config = config_of(rng, architecture)
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        read = transformers.AutoConfig.from_pretrained(folder)
        model = without_tables(getattr(transformers, architecture)(read))
        total, (largest, names) = calculate_maximum_sizes(model)
        stored = rng.choice(["float32", "bfloat16"])
        model = model.to(getattr(torch, stored))
        model.save_pretrained(folder, max_shard_size=rng.choice([2000, 20_000, 10 ** 9]))
        shards, tensors = [], {}
        for file in sorted(os.listdir(folder)):
            if file.endswith(".safetensors"):
                with safe_open(os.path.join(folder, file), "pt") as opened:
                    shards.append(sorted(opened.keys()))
                    tensors.update({key: list(opened.get_slice(key).get_shape()) for key in opened.keys()})
        # An expert is one of several modules in the files, and part of two tensors in transformers' memory.
        plans = [plan(rng, model, stored, splits=architecture != "MixtralForCausalLM") for _ in range(8)]
    return {"id": name, "config": dict(config, dtype=stored), "tensors": tensors, "shards": shards,
            "estimate": {"total": total, "largest": largest, "names": sorted(names)}, "plans": [each for each in plans if each][:4]}


def main():
    torch.set_num_threads(1)
    seed, count = int(os.environ.get("SEED", "1")), int(os.environ.get("COUNT", "28"))
    with open(os.environ.get("OUT", os.path.join(HERE, "cases.jsonl")), "w", encoding="utf-8") as file:
        for i in range(count):
            architecture = FAMILIES[i % len(FAMILIES)]
            made = case(random.Random("%d %d" % (seed, i)), "%s %d %d" % (architecture, seed, i), architecture)
            file.write(json.dumps(made, separators=(",", ":")) + "\n")


main()
