#!/usr/bin/env python3
"""usage: python make.py [--seed N] [--count N] [--out FILE]

Writes cases.jsonl: what generate() of transformers 5.17.0 says under rules that hf_generate does not have, alone and together, in the models
of ../golden/hf_generate. A case whose tokens differ in float64 hangs on rounding and is left out. Words are not longer than the prompt: transformers
lets a word pass whose beginning is the whole row.
"""

import argparse
import json
import os
import random

import torch
from transformers import AutoModelForCausalLM

HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = os.path.join(os.path.dirname(HERE), "golden")
RULES = ["bad_words_ids", "min_length", "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty",
         "suppress_tokens", "begin_suppress_tokens", "repetition_penalty", "no_repeat_ngram_size"]


def said(model, ids, settings):
    beams = settings.get("num_beams", 1)
    out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, return_dict_in_generate=True,
                         output_scores=beams > 1, **settings)
    got = {"generated": out.sequences[:, ids.shape[1]:].tolist()}
    if beams > 1:
        got["scores"] = out.sequences_scores.tolist()
    return got


def value(rule, rng, likely, vocab, length, new):
    some = lambda most: rng.sample(likely, min(len(likely), rng.randint(1, most)))
    if rule == "bad_words_ids":
        return [[rng.choice(likely) for _ in range(rng.randint(1, min(length, 3)))] for _ in range(rng.randint(1, 8))]
    if rule == "min_length":
        return length + rng.randint(1, new)
    if rule == "min_new_tokens":
        return rng.randint(1, new)
    if rule == "forced_bos_token_id":
        return rng.randrange(vocab)
    if rule == "forced_eos_token_id":
        return rng.choice([rng.randrange(vocab), [rng.randrange(vocab), rng.randrange(vocab)]])
    if rule == "exponential_decay_length_penalty":
        return [rng.randint(0, 4), rng.choice([1.1, 1.5, 2.0])]
    if rule in ("suppress_tokens", "begin_suppress_tokens"):
        return some(12)
    return rng.choice([1.2, 2.0]) if rule == "repetition_penalty" else rng.randint(2, 3)


def case(model, wide, name, rng):
    vocab = model.config.vocab_size
    length, new = rng.choice([1, 1, 3, 5, 9]), rng.randint(3, 12)
    ids = torch.tensor([[rng.randrange(vocab) for _ in range(length)] for _ in range(rng.randint(1, 3))])
    settings = {"max_new_tokens": new, "pad_token_id": vocab - 1}
    plain = said(model, ids, dict(settings, eos_token_id=None))["generated"]
    likely = sorted({token for row in plain for token in row})
    ends = rng.choice([None, rng.choice(likely), [rng.choice(likely), rng.randrange(vocab)]])
    settings["eos_token_id"] = ends
    for rule in rng.sample(RULES, rng.choice([1, 1, 2, 3, 5])):
        if ends is None and rule in ("min_length", "min_new_tokens", "exponential_decay_length_penalty"):
            continue
        settings[rule] = value(rule, rng, likely, vocab, length, new)
    if rng.random() < 0.4:
        settings.update(num_beams=rng.randint(2, 4), length_penalty=rng.choice([0.5, 1.0, 2.0]),
                        early_stopping=rng.choice([True, False, "never"]))
        settings["num_return_sequences"] = rng.randint(1, settings["num_beams"])
    try:
        out = said(model, ids, settings)
    except (ValueError, RuntimeError, IndexError):
        return None
    if out["generated"] != said(wide, ids, settings)["generated"]:
        return None
    # Of equal scores, which comes first is chance.
    if "num_beams" in settings and isinstance(settings.get("forced_eos_token_id"), list):
        return None
    # An end token that may not come yet has a score that is no number then, and comes.
    decays = "exponential_decay_length_penalty" in settings
    if decays and any(rule in settings for rule in RULES[:5] + ["no_repeat_ngram_size"]):
        return None
    scores = out.get("scores", [])
    if any(abs(score) > 1e6 for score in scores) or len(set(scores)) < len(scores):
        return None
    given = {"dir": "hf_generate/" + name, "architecture": model.config.architectures[0], "mode": "beam" if "scores" in out else "greedy",
             "input_ids": ids.tolist()}
    return {"in": dict(given, **settings), "out": out}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=18, help="for each model")
    parser.add_argument("--out", default=os.path.join(HERE, "cases.jsonl"))
    flags = parser.parse_args()
    torch.set_num_threads(1)
    rng = random.Random(flags.seed)
    with open(flags.out, "w", encoding="utf-8") as file:
        for name in sorted(os.listdir(os.path.join(MODELS, "hf_generate"))):
            folder = os.path.join(MODELS, "hf_generate", name)
            model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, experts_implementation="eager").eval()
            wide = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, experts_implementation="eager").eval()
            for each in (model, wide):
                # The files of the models have no settings of their own to be mixed in.
                each.generation_config = type(each.generation_config)()
            for number in range(flags.count):
                found = case(model, wide, name, rng)
                if found is not None:
                    file.write(json.dumps(dict(id="%s/%d" % (name, number), **found), separators=(",", ":")) + "\n")


main()
