#!/usr/bin/env python3
"""usage: [SEED=N] [COUNT=N] [OUT=FILE] python make.py

Writes cases.jsonl: what models of transformers 5.17.0 say, lose and learn whose config.json is put together at random: every setting that changes numbers, as transformers 4
and 5 write it, some config.json as the Hub has them, with smaller sizes, and some with numbers at the end of what is allowed. README.md has the format. A model whose numbers differ by more than rounding in float64 is left out.
"""

import copy
import json
import os
import random
import tempfile
import warnings

import numpy
import torch
import transformers
from safetensors.torch import load_file, save_file

warnings.filterwarnings("ignore")
transformers.logging.set_verbosity_error()
transformers.logging.disable_progress_bar()

HERE = os.path.dirname(os.path.abspath(__file__))
CLASSES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "mixtral": "MixtralForCausalLM", "qwen2": "Qwen2ForCausalLM", "gpt2": "GPT2LMHeadModel",
           "masked": "BertForMaskedLM", "classes": "BertForSequenceClassification"}
CONFIGS = {"LlamaForCausalLM": "LlamaConfig", "MistralForCausalLM": "MistralConfig", "MixtralForCausalLM": "MixtralConfig", "Qwen2ForCausalLM": "Qwen2Config",
           "GPT2LMHeadModel": "GPT2Config", "BertForMaskedLM": "BertConfig", "BertForSequenceClassification": "BertConfig"}
ACTIVATIONS = ["gelu", "gelu_10", "gelu_fast", "gelu_new", "gelu_python", "gelu_pytorch_tanh", "gelu_python_tanh", "gelu_accurate", "hardswish", "laplace", "leaky_relu",
               "linear", "mish", "quick_gelu", "relu", "relu2", "relu6", "sigmoid", "silu", "sqrtsoftplus", "swish", "tanh"]


def numbers(name, count):
    """From -0.5 to 0.5, which follow from the name: FNV-1a of it, and of each index the last steps of MurmurHash3."""
    salt = 2166136261
    for byte in name.encode():
        salt = (salt ^ byte) * 16777619 & 0xFFFFFFFF
    with numpy.errstate(over="ignore"):
        x = numpy.arange(count, dtype=numpy.uint32) * numpy.uint32(0x9E3779B1) + numpy.uint32(salt)
        x ^= x >> numpy.uint32(16)
        x *= numpy.uint32(0x85EBCA6B)
        x ^= x >> numpy.uint32(13)
        x *= numpy.uint32(0xC2B2AE35)
        x ^= x >> numpy.uint32(16)
    return x.astype(numpy.float64) / 2.0 ** 32 - 0.5


def weight(name, shape):
    values = numbers(name, int(numpy.prod(shape)))
    if len(shape) > 1:
        values = values * 0.8
    elif name.endswith("weight"):
        values = 1 + values * 0.6
    else:
        values = values * 0.4
    return torch.from_numpy(values.astype(numpy.float32)).view(shape)


def rope(rng, head_dim):
    kind = rng.choice(["default", "linear", "dynamic", "yarn", "yarn", "llama3", "longrope"])
    out = {"rope_type": kind}
    if kind in ("linear", "dynamic", "yarn", "llama3"):
        out["factor"] = rng.choice([2.0, 4, 1.5, 32.0])
    if kind == "yarn":
        for name, values in [("original_max_position_embeddings", [8, 16, 64, 2048]), ("attention_factor", [1.0, 1.2, 0.7]), ("beta_fast", [16.0, 4]), ("beta_slow", [2.0, 0.5]),
                             ("mscale", [1.0, 0.707]), ("mscale_all_dim", [1.0, 0.8, 0.0]), ("truncate", [True, False, None])]:
            if rng.random() < 0.4:
                out[name] = rng.choice(values)
        if rng.random() < 0.15:
            out["factor"] = None
    if kind == "llama3":
        out.update(low_freq_factor=rng.choice([1, 0.5]), high_freq_factor=rng.choice([4.0, 8]))
        if rng.random() < 0.9:
            out["original_max_position_embeddings"] = rng.choice([8, 32, 8192])
    if kind == "longrope":
        out["short_factor"] = [round(rng.uniform(1, 1.5), 3) for _ in range(head_dim // 2)]
        out["long_factor"] = [round(rng.uniform(1, 8), 3) for _ in range(head_dim // 2)]
        for name, values in [("factor", [2.0, 4.0]), ("attention_factor", [1.1, 1.3]), ("original_max_position_embeddings", [4, 8])]:
            if rng.random() < 0.5:
                out[name] = rng.choice(values)
    if rng.random() < 0.6:
        out["rope_theta"] = rng.choice([100.0, 500000.0, 1e6])
    return out


def decoder(rng, family):
    heads = rng.choice([1, 2, 4, 6])
    head_dim = rng.choice([4, 6, 8])
    out = {"model_type": family, "hidden_size": heads * rng.choice([head_dim, 4, 8]), "intermediate_size": rng.choice([16, 21]), "num_hidden_layers": rng.choice([1, 2, 3]),
           "num_attention_heads": heads, "num_key_value_heads": rng.choice([k for k in (1, 2, 3, 6) if heads % k == 0] + [None] * (family in ("llama", "qwen2"))), "vocab_size": rng.choice([23, 37]),
           "max_position_embeddings": rng.choice([8, 16, 64]), "rms_norm_eps": rng.choice([1e-5, 1e-6, 1e-2]), "hidden_act": rng.choice(ACTIVATIONS + ["silu"] * 8),
           "tie_word_embeddings": rng.random() < 0.4, "pad_token_id": rng.choice([None, 0, 3]), "rope_parameters": rope(rng, head_dim)}
    if out["hidden_size"] != heads * head_dim or family == "mixtral":
        out["head_dim"] = head_dim  # transformers 5.17 finds no "yarn" for a Mixtral without one
    if family == "llama":
        out.update(attention_bias=rng.random() < 0.4, mlp_bias=rng.random() < 0.4)
    if family in ("mistral", "mixtral"):
        out["sliding_window"] = rng.choice([None, 2, 3, 4096])
    if family == "mixtral":
        experts = rng.choice([1, 2, 4, 8])
        out.update(num_local_experts=experts, num_experts_per_tok=rng.randint(1, experts), router_aux_loss_coef=rng.choice([0.02, 1.0]), output_router_logits=rng.random() < 0.5)
    if family == "qwen2":
        out.update(use_sliding_window=rng.random() < 0.7, sliding_window=rng.choice([None, 2, 3]), max_window_layers=rng.choice([0, 1, 28]))
        if out["use_sliding_window"] and out["sliding_window"] and rng.random() < 0.4:
            out["layer_types"] = [rng.choice(["full_attention", "sliding_attention"]) for _ in range(out["num_hidden_layers"])]
    return out


def gpt2(rng):
    heads = rng.choice([1, 2, 4])
    return {"model_type": "gpt2", "n_embd": heads * rng.choice([4, 6]), "n_layer": rng.choice([1, 2, 3]), "n_head": heads, "n_inner": rng.choice([None, 20]), "n_positions": 40,
            "vocab_size": rng.choice([23, 37]), "activation_function": rng.choice(ACTIVATIONS), "layer_norm_epsilon": rng.choice([1e-5, 1e-3]),
            "scale_attn_weights": rng.random() < 0.6, "scale_attn_by_inverse_layer_idx": rng.random() < 0.4, "reorder_and_upcast_attn": rng.random() < 0.3,
            "tie_word_embeddings": rng.random() < 0.7, "pad_token_id": rng.choice([None, 0])}


def bert(rng, family):
    heads = rng.choice([1, 2, 4])
    out = {"model_type": "bert", "hidden_size": heads * rng.choice([4, 6]), "num_hidden_layers": rng.choice([1, 2, 3]), "num_attention_heads": heads,
           "intermediate_size": rng.choice([16, 21]), "vocab_size": rng.choice([23, 37]), "hidden_act": rng.choice(ACTIVATIONS), "max_position_embeddings": 40,
           "type_vocab_size": rng.choice([1, 2, 4]), "layer_norm_eps": rng.choice([1e-12, 1e-3]), "pad_token_id": rng.choice([None, 0, 3]),
           "tie_word_embeddings": rng.random() < 0.7}
    if family == "classes":
        count = rng.choice([1, 2, 3])
        out["id2label"] = {str(i): "L%d" % i for i in range(count)}
        out["problem_type"] = rng.choice([None, "regression", "single_label_classification" if count > 1 else None, "multi_label_classification"])
    return out


def respelled(rng, config):
    """As transformers 4 and older wrote it."""
    out = copy.deepcopy(config)
    parameters = out.get("rope_parameters")
    if parameters is not None and rng.random() < 0.7:
        del out["rope_parameters"]
        if "rope_theta" in parameters:
            out["rope_theta"] = parameters.pop("rope_theta")
        if rng.random() < 0.5:
            parameters["type"] = parameters.pop("rope_type")
        if parameters.get("original_max_position_embeddings") and rng.random() < 0.4:
            out["original_max_position_embeddings"] = parameters.pop("original_max_position_embeddings")
        out["rope_scaling"] = None if parameters in ({"type": "default"}, {"rope_type": "default"}) else parameters
    defaults = getattr(transformers, type(transformers.AutoConfig.for_model(out["model_type"])).__name__)().to_dict()
    for name in list(out):
        if name != "model_type" and name in defaults and defaults[name] == out[name] and rng.random() < 0.5:
            del out[name]
    if out["model_type"] == "gpt2" and rng.random() < 0.2:
        out.update(hidden_size=out.pop("n_embd"), num_hidden_layers=out.pop("n_layer", 12), num_attention_heads=out.pop("n_head", 12), max_position_embeddings=out.pop("n_positions"))
    if "num_local_experts" in out and rng.random() < 0.2:
        out["num_experts"] = out.pop("num_local_experts")
    for name, value in [("xla_device", None), ("_num_labels", 3), ("output_past", True), ("torch_dtype", "float16"), ("gradient_checkpointing", False)]:
        if rng.random() < 0.1:
            out[name] = value
    return out


def of_the_hub():
    """As the folders of these names have them, with smaller sizes."""
    old = {"finetuning_task": None, "id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"LABEL_0": 0, "LABEL_1": 1}, "output_attentions": False,
           "output_hidden_states": False, "pruned_heads": {}, "torchscript": False, "use_bfloat16": False, "xla_device": None, "is_decoder": False}
    gpt = {"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "bos_token_id": 22, "embd_pdrop": 0.1, "eos_token_id": 22,
           "initializer_range": 0.02, "layer_norm_epsilon": 1e-05, "model_type": "gpt2", "n_ctx": 40, "n_embd": 12, "n_head": 2, "n_layer": 2, "n_positions": 40,
           "resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_proj_to_labels": True, "summary_type": "cls_index",
           "summary_use_proj": True, "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 23}
    base = {"hidden_act": "silu", "hidden_size": 16, "initializer_range": 0.02, "intermediate_size": 21, "num_attention_heads": 4, "num_hidden_layers": 2, "use_cache": True,
            "vocab_size": 37, "bos_token_id": 1, "eos_token_id": 2}
    llama = dict(base, architectures=["LlamaForCausalLM"], model_type="llama", tie_word_embeddings=False)
    qwen = dict(base, architectures=["Qwen2ForCausalLM"], model_type="qwen2", attention_dropout=0.0, max_position_embeddings=64, max_window_layers=28, num_key_value_heads=2,
                rms_norm_eps=1e-06, rope_theta=1000000.0, sliding_window=64, torch_dtype="bfloat16", use_sliding_window=False)
    mistral = dict(base, architectures=["MistralForCausalLM"], model_type="mistral", max_position_embeddings=64, num_key_value_heads=2, rms_norm_eps=1e-05, rope_theta=10000.0,
                   sliding_window=4, tie_word_embeddings=False, torch_dtype="bfloat16", transformers_version="4.34.0.dev0")
    uncased = {"attention_probs_dropout_prob": 0.1, "hidden_act": "gelu", "hidden_dropout_prob": 0.1, "hidden_size": 12, "initializer_range": 0.02, "intermediate_size": 21,
               "max_position_embeddings": 40, "num_attention_heads": 2, "num_hidden_layers": 2, "type_vocab_size": 2, "vocab_size": 37}
    return {
        "gpt2": gpt,
        "distilgpt2": dict(gpt, _num_labels=1, id2label={"0": "LABEL_0"}, label2id={"LABEL_0": 0}),
        "gpt2 of 2019": dict({k: v for k, v in gpt.items() if k not in ("architectures", "activation_function", "task_specific_params")}, **dict(old, num_labels=1)),
        "a GPT-2 of 2021": dict(gpt, gradient_checkpointing=False, n_inner=None, output_past=True, reorder_and_upcast_attn=True, scale_attn_by_inverse_layer_idx=True,
                                scale_attn_weights=True, tokenizer_class="BertTokenizer", use_cache=True),
        "huggyllama/llama-7b": dict(llama, max_position_embeddings=64, max_sequence_length=64, pad_token_id=0, rms_norm_eps=1e-06, torch_dtype="float16",
                                    transformers_version="4.28.0.dev0"),
        "Llama-2-7b-hf": dict(llama, _name_or_path="meta-llama/Llama-2-7b-hf", max_position_embeddings=64, num_key_value_heads=4, pretraining_tp=1, rms_norm_eps=1e-05,
                              rope_scaling=None, torch_dtype="float16", transformers_version="4.31.0.dev0"),
        "Llama-3.1-8B": dict(llama, attention_bias=False, attention_dropout=0.0, max_position_embeddings=64, mlp_bias=False, num_key_value_heads=2, pretraining_tp=1,
                             eos_token_id=[2, 5], rms_norm_eps=1e-05, rope_theta=500000.0, torch_dtype="bfloat16", transformers_version="4.43.0.dev0",
                             rope_scaling={"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 16, "rope_type": "llama3"}),
        "Llama-3.2-1B": dict(llama, attention_bias=False, attention_dropout=0.0, head_dim=6, max_position_embeddings=64, mlp_bias=False, num_key_value_heads=2, pretraining_tp=1,
                             rms_norm_eps=1e-05, rope_theta=500000.0, tie_word_embeddings=True, torch_dtype="bfloat16",
                             rope_scaling={"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 16, "rope_type": "llama3"}),
        "SmolLM2-135M-Instruct": dict(llama, attention_bias=False, attention_dropout=0.0, is_llama_config=True, max_position_embeddings=64, mlp_bias=False, num_key_value_heads=2,
                                      pad_token_id=2, pretraining_tp=1, rms_norm_eps=1e-05, rope_interleaved=False, rope_scaling=None, rope_theta=100000, tie_word_embeddings=True,
                                      torch_dtype="bfloat16", **{"transformers.js_config": {"dtype": "q4", "kv_cache_dtype": {"q4f16": "float16", "fp16": "float16"}}}),
        "Mistral-7B-v0.1": mistral,
        "Mixtral-8x7B-v0.1": dict(mistral, architectures=["MixtralForCausalLM"], model_type="mixtral", attention_dropout=0.0, num_experts_per_tok=2, num_local_experts=8,
                                  output_router_logits=False, rope_theta=1000000.0, router_aux_loss_coef=0.02, sliding_window=None, transformers_version="4.36.0.dev0"),
        "Qwen2-0.5B": dict(qwen, tie_word_embeddings=True, transformers_version="4.40.1"),
        "Qwen2.5-1.5B": dict(qwen, tie_word_embeddings=True, use_mrope=False, transformers_version="4.40.1"),
        "Qwen2.5-7B-Instruct with yarn": dict(qwen, tie_word_embeddings=False, rope_scaling={"factor": 4.0, "original_max_position_embeddings": 16, "type": "yarn"}),
        "bert-base-uncased": dict(uncased, architectures=["BertForMaskedLM"], gradient_checkpointing=False, layer_norm_eps=1e-12, model_type="bert", pad_token_id=0,
                                  position_embedding_type="absolute", transformers_version="4.6.0.dev0", use_cache=True),
        "google/bert_uncased_L-2_H-128_A-2": dict(uncased, _architecture="BertForMaskedLM"),
        "a classifier of 2020": dict(uncased, _num_labels=5, architectures=["BertForSequenceClassification"], directionality="bidi", finetuning_task=None, layer_norm_eps=1e-12,
                                     model_type="bert", id2label={str(i): "%d stars" % (i + 1) for i in range(5)}, output_past=True, pad_token_id=0, pooler_fc_size=768,
                                     label2id={"%d stars" % (i + 1): i for i in range(5)}, pooler_num_attention_heads=12, pooler_num_fc_layers=3, pooler_size_per_head=128,
                                     pooler_type="first_token_transform"),
        "a classifier of 2019": dict(uncased, **dict(old, _architecture="BertForSequenceClassification", num_labels=2, language="english", name="Bert", layer_norm_eps=1e-12)),
    }


def edges():
    """Numbers at the end of what is allowed, and what the draws do not have."""
    small = {"hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 23, "max_position_embeddings": 64}
    mixtral = dict(small, model_type="mixtral", num_key_value_heads=1, head_dim=4, num_local_experts=4, sliding_window=None)
    # transformers loads no Mixtral with an intermediate_size of 1 that it has saved itself.
    one = {"intermediate_size": 1, "num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 1}
    return {
        "proportional": ("llama", dict(small, model_type="llama", head_dim=12,
                                       rope_parameters={"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0, "rope_theta": 100.0})),
        "proportional, outside": ("qwen2", dict(small, model_type="qwen2", num_key_value_heads=1, partial_rotary_factor=0.3, rope_theta=50.0, rope_scaling={"rope_type": "proportional"})),
        "ones of a Llama": ("llama", dict(one, model_type="llama", hidden_size=1, head_dim=2, num_key_value_heads=1, max_position_embeddings=1)),
        "ones of a Mixtral": ("mixtral", dict(mixtral, intermediate_size=2, num_local_experts=1, num_experts_per_tok=1, max_position_embeddings=1)),
        "window of 1": ("mistral", dict(small, model_type="mistral", num_key_value_heads=1, sliding_window=1)),
        "window of 1 in a layer": ("qwen2", dict(small, model_type="qwen2", num_key_value_heads=1, use_sliding_window=True, sliding_window=1, max_window_layers=1)),
        "ones of a GPT-2": ("gpt2", {"model_type": "gpt2", "n_embd": 1, "n_head": 1, "n_layer": 1, "n_inner": 1, "vocab_size": 1, "n_positions": 40}),
        "odd heads of a GPT-2": ("gpt2", {"model_type": "gpt2", "n_embd": 9, "n_head": 3, "n_layer": 2, "n_inner": 7, "vocab_size": 5, "n_positions": 40}),
        "ones of a BERT": ("masked", dict(one, model_type="bert", hidden_size=1, type_vocab_size=1, max_position_embeddings=40)),
        "odd heads of a BERT": ("classes", dict(small, model_type="bert", hidden_size=15, num_attention_heads=3, type_vocab_size=1)),
        "experts in one tensor": ("mixtral", dict(mixtral, num_experts_per_tok=2)),
    }


def in_files(model, tensors):
    """By the names of the files: a Mixtral's experts one by one."""
    out = {}
    for name, tensor in tensors.items():
        base = name.replace(".mlp.", ".block_sparse_moe.")
        if name.endswith(".experts.gate_up_proj"):
            for i, both in enumerate(tensor):
                out[base.replace("gate_up_proj", "%d.w1.weight" % i)], out[base.replace("gate_up_proj", "%d.w3.weight" % i)] = both.chunk(2, 0)
        elif name.endswith(".experts.down_proj"):
            out.update({base.replace("down_proj", "%d.w2.weight" % i): each for i, each in enumerate(tensor)})
        else:
            out[base if "Mixtral" in type(model).__name__ else name] = tensor
    return out


def load(folder, architecture, dtype):
    extra = {"experts_implementation": "eager"} if "Mixtral" in architecture else {}
    return getattr(transformers, architecture).from_pretrained(folder, dtype=dtype, attn_implementation="sdpa", **extra).eval()


def padding(rng, rows, length, side):
    mask = torch.ones(rows, length, dtype=torch.long)
    for row in mask:
        count = rng.randint(0, length - 1)
        if side == "left":
            row[:count] = 0
        elif side == "right":
            row[length - count:] = 0
        else:
            row[[rng.randrange(1, length) for _ in range(count)]] = 0
    return mask


def has_meaning(mask, config):
    """Where a decoder sees a token in every layer: elsewhere, what it says depends on the kernel of attention."""
    window = config.get("sliding_window") or mask.size(1)
    if config.get("layer_types") and "sliding_attention" not in config["layer_types"]:
        window = mask.size(1)
    before = torch.nn.functional.pad(mask.cumsum(1), (window, 0))
    return before[:, window:] - before[:, :-window] > 0


def inputs(rng, config, architecture):
    encoder = architecture.startswith("Bert")
    vocab = config["vocab_size"]
    rows, length = rng.choice([(1, 2), (2, 5), (3, 9), (1, 33)])
    draw = lambda most: torch.tensor([[rng.randrange(most) for _ in range(length)] for _ in range(rows)])
    batch = {"input_ids": draw(vocab)}
    side = rng.choice([None, "left", "right", "holes"])
    if side:
        batch["attention_mask"] = padding(rng, rows, length, side)
    if encoder and rng.random() < 0.7:
        batch["token_type_ids"] = draw(config.get("type_vocab_size", 2))
    if architecture == "GPT2LMHeadModel" and rng.random() < 0.3:
        batch["token_type_ids"] = draw(vocab)
    if rng.random() < 0.3:
        cut = rng.randint(1, length)
        batch["position_ids"] = (torch.cat([torch.arange(cut), torch.arange(length - cut)]) + rng.randint(0, 3)).unsqueeze(0)
    if architecture == "BertForSequenceClassification":
        return batch, None
    labels = batch["input_ids"].clone()
    labels[torch.tensor([[rng.random() < 0.2 for _ in range(length)] for _ in range(rows)])] = -100
    labels[:, -1] = batch["input_ids"][:, -1]
    if side and not encoder:
        labels[:, 1:][~has_meaning(batch["attention_mask"], config)[:, :-1]] = -100
    return batch, labels


def class_labels(rng, model, rows):
    count, problem = model.config.num_labels, model.config.problem_type
    if problem is None:
        problem = "regression" if count == 1 else rng.choice(["single", "multi"])
    if problem == "regression":
        return torch.tensor([[rng.choice([0.5, -1.25, 2.0]) for _ in range(count)] for _ in range(rows)])
    if problem.startswith("single"):
        return torch.tensor([rng.randrange(count) for _ in range(rows)])
    return torch.tensor([[float(rng.randint(0, 1)) for _ in range(count)] for _ in range(rows)])


def what_it_says(logits, batch, config):
    """Of each position the best logit and a sum that all have a part in; null where they have no meaning."""
    flat = logits.double().flatten(0, -2)
    sums = flat @ torch.from_numpy(numbers("logits", flat.size(1)))
    rows = torch.stack([flat.amax(1), sums], 1).tolist()
    if "attention_mask" in batch and config["model_type"] != "bert":
        rows = [row if kept else None for row, kept in zip(rows, has_meaning(batch["attention_mask"], config).flatten().tolist())]
    return rows


def run(folder, architecture, dtype, batch, labels, passes, rng):
    model = load(folder, architecture, dtype)
    if labels is None:
        labels = class_labels(rng, model, len(batch["input_ids"]))
    cast = labels.to(dtype) if labels.is_floating_point() else labels
    out = {}
    # With a cache, positions that begin again do not begin a text.
    alone = {} if architecture.startswith("Bert") else {"use_cache": False}
    said = load(folder, architecture, dtype)(**batch, **alone).logits
    config = model.config.to_dict()
    out["said"] = what_it_says(said.detach(), batch, config)
    output = model(**batch, **alone, labels=cast)
    if output.loss.isfinite():
        output.loss.backward()
        out["loss"] = output.loss.item()
        if getattr(output, "aux_loss", None) is not None:
            out["aux_loss"] = output.aux_loss.item()
        gradients = in_files(model, {name: p.grad for name, p in model.named_parameters() if p.grad is not None})
        out["gradients"] = {name: [each.double().norm().item(), float(each.double().flatten().numpy() @ numbers(name, each.numel()))]
                            for name, each in sorted(gradients.items())}
    if passes:
        model = load(folder, architecture, dtype)
        model.config.output_router_logits = False  # which fails beside a mask of past positions
        cache, at, said = transformers.DynamicCache(config=model.config), 0, []
        for count in passes:
            given = {"input_ids": batch["input_ids"][:, at:at + count]}
            if "attention_mask" in batch:
                given["attention_mask"] = batch["attention_mask"][:, :at + count]
            try:
                with torch.no_grad():
                    said.append(model(**given, past_key_values=cache, use_cache=True).logits)
            except RuntimeError:
                # There are several tokens behind a cache that holds only a window.
                return out, labels
            at += count
        out["said_in_passes"] = what_it_says(torch.cat(said, 1), batch, config)
    return out, labels


def differs(a, b):
    if isinstance(a, dict):
        return any(differs(a[name], b[name]) for name in a)
    if isinstance(a, list):
        return any(differs(x, y) for x, y in zip(a, b))
    return a is not None and abs(a - b) > 2e-5 * max(1, abs(b))


def short(value):
    if isinstance(value, dict):
        return {name: short(each) for name, each in value.items()}
    if isinstance(value, list):
        return [short(each) for each in value]
    return None if value is None else float("%.7g" % value)


def case(rng, name, config, architecture):
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        read = getattr(transformers, CONFIGS[architecture]).from_pretrained(folder)
        if "Mixtral" in architecture:
            read._experts_implementation = "eager"
        getattr(transformers, architecture)(read).save_pretrained(folder, save_original_format=name != "experts in one tensor")
        path = os.path.join(folder, "model.safetensors")
        shapes = {key: list(tensor.shape) for key, tensor in sorted(load_file(path).items())}
        save_file({key: weight(key, shape) for key, shape in shapes.items()}, path, {"format": "pt"})
        with open(os.path.join(folder, "config.json"), "w", encoding="utf-8") as file:
            json.dump(config, file)
        batch, labels = inputs(rng, read.to_dict(), architecture)
        passes = []
        length = batch["input_ids"].size(1)
        # With a cache, transformers sees everything through a window of 1.
        if not architecture.startswith("Bert") and rng.random() < 0.6 and config.get("sliding_window") != 1:
            while sum(passes) < length:
                passes.append(min(length - sum(passes), rng.choice([1, 1, 2, 4, 12])))
        out, labels = run(folder, architecture, torch.float32, batch, labels, passes, random.Random(name))
        exact, _ = run(folder, architecture, torch.float64, batch, labels if architecture != "BertForSequenceClassification" else None, passes, random.Random(name))
        if differs(out, exact):
            return None
        given = {key: tensor.tolist() for key, tensor in batch.items()}
        return {"id": name, "architecture": architecture, "config": config, "tensors": shapes,
                "in": dict(given, labels=labels.tolist(), passes=passes if "said_in_passes" in out else []), "out": short(out)}


def main():
    torch.set_num_threads(1)
    seed, count = int(os.environ.get("SEED", "1")), int(os.environ.get("COUNT", "70"))
    with open(os.environ.get("OUT", os.path.join(HERE, "cases.jsonl")), "w", encoding="utf-8") as file:
        def write(rng, name, config, architecture):
            made = case(rng, name, config, architecture)
            if made is not None:
                file.write(json.dumps(made, separators=(",", ":")) + "\n")
        if "SEED" not in os.environ:
            for name, config in of_the_hub().items():
                architecture = config.pop("_architecture", None) or config.get("architectures", ["GPT2LMHeadModel"])[0]
                write(random.Random(name), name, config, architecture)
            for name, (family, config) in edges().items():
                write(random.Random(name), name, config, CLASSES[family])
        for i in range(count):
            family = list(CLASSES)[i % len(CLASSES)]
            rng = random.Random("%d %d" % (seed, i))
            config = gpt2(rng) if family == "gpt2" else bert(rng, family) if family in ("masked", "classes") else decoder(rng, family)
            write(rng, "%s %d %d" % (family, seed, i), respelled(rng, config), CLASSES[family])


main()
