#!/usr/bin/env python3
"""usage: python make.py [--seed N] [--count N] [--out FILE] [--ends_and_draws_out FILE]

Writes tokenizer_*.json and ends_and_draws.jsonl: what it says with stop strings, with rules for sampling (the log-probabilities after them) and with
beams that are drawn, from numbers as muster::models::GenerateOptions has them; and cases.jsonl: what generate() of transformers 5.17.0 says under rules that hf_generate does not have, alone and together, in the models
of ../golden/hf_generate. A case whose tokens differ in float64 hangs on rounding and is left out. Words are not longer than the prompt: transformers
lets a word pass whose beginning is the whole row.
"""

import argparse
import json
import os
import random

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

HERE = os.path.dirname(os.path.abspath(__file__))
MODELS = os.path.join(os.path.dirname(HERE), "golden")
RULES = ["bad_words_ids", "min_length", "min_new_tokens", "forced_bos_token_id", "forced_eos_token_id", "exponential_decay_length_penalty",
         "suppress_tokens", "begin_suppress_tokens", "repetition_penalty", "no_repeat_ngram_size", "encoder_repetition_penalty",
         "encoder_no_repeat_ngram_size", "renormalize_logits"]


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
    if rule == "renormalize_logits":
        return True
    if rule == "encoder_repetition_penalty":
        return rng.choice([0.5, 1.5, 3.0])
    if rule == "encoder_no_repeat_ngram_size":
        return rng.randint(1, 3)
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
    # transformers finds the prompts of the first beams only.
    if "num_beams" in settings and "encoder_repetition_penalty" in settings:
        return None
    try:
        out = said(model, ids, settings)
    except (ValueError, RuntimeError, IndexError):
        return None
    if out["generated"] != said(wide, ids, settings)["generated"]:
        return None
    # Which of equal scores comes first is chance.
    if "num_beams" in settings and isinstance(settings.get("forced_eos_token_id"), list):
        return None
    # An end token that may not come yet has a score that is not a number then, and comes.
    decays = "exponential_decay_length_penalty" in settings
    if decays and any(rule in settings for rule in RULES[:5] + ["no_repeat_ngram_size"]):
        return None
    scores = out.get("scores", [])
    if any(abs(score) > 1e6 for score in scores) or len(set(scores)) < len(scores):
        return None
    given = {"dir": "hf_generate/" + name, "architecture": model.config.architectures[0], "mode": "beam" if "scores" in out else "greedy",
             "input_ids": ids.tolist()}
    return {"in": dict(given, **settings), "out": out}


ENDS_AND_DRAWS_RULES = {"temperature": [0.3, 0.7, 2.0], "top_h": [0.1, 0.5, 0.9, 1.0], "top_k": [1, 3, 20], "top_p": [0.3, 0.8, 0.95], "min_p": [0.05, 0.3],
                        "typical_p": [0.1, 0.5, 0.9], "epsilon_cutoff": [0.003, 0.02, 0.1], "eta_cutoff": [0.003, 0.02, 0.3]}


class Draws:
    """Uniform numbers of std::mt19937_64, seeded by std::seed_seq{low, high, row}."""

    def __init__(self, seed, row):
        words = self.seed_seq([seed & 0xFFFFFFFF, seed >> 32, row], 624)
        self.state = [words[2 * i] | words[2 * i + 1] << 32 for i in range(312)]
        self.at = 312

    @staticmethod
    def seed_seq(seeds, n):
        mask = 0xFFFFFFFF
        out, s, t, = [0x8B8B8B8B] * n, len(seeds), 11
        p = (n - t) // 2
        q = p + t
        mix = lambda x: x ^ x >> 27
        for k in range(max(s + 1, n)):
            r = 1664525 * mix(out[k % n] ^ out[(k + p) % n] ^ out[(k - 1) % n]) & mask
            out[(k + p) % n] = out[(k + p) % n] + r & mask
            r = r + (s if k == 0 else k % n + seeds[k - 1] if k <= s else k % n) & mask
            out[(k + q) % n] = out[(k + q) % n] + r & mask
            out[k % n] = r
        for k in range(max(s + 1, n), max(s + 1, n) + n):
            r = 1566083941 * mix(out[k % n] + out[(k + p) % n] + out[(k - 1) % n] & mask) & mask
            out[(k + p) % n] ^= r
            r = r - k % n & mask
            out[(k + q) % n] ^= r
            out[k % n] = r
        return out

    def next(self):
        if self.at == 312:
            x = self.state
            for i in range(312):
                y = x[i] & 0xFFFFFFFF80000000 | x[(i + 1) % 312] & 0x7FFFFFFF
                x[i] = x[(i + 156) % 312] ^ y >> 1 ^ (0xB5026F5AA96619E9 if y & 1 else 0)
            self.at = 0
        y = self.state[self.at]
        self.at += 1
        y ^= y >> 29 & 0x5555555555555555
        y ^= y << 17 & 0x71D67FFFEDA60000
        y ^= y << 37 & 0xFFF7EEE000000000
        y ^= y >> 43
        return (y >> 11) * 2.0 ** -53


def drawn_beams(model, ids, settings, seed):
    draws = [Draws(seed, row) for row in range(len(ids))]

    def multinomial(likely, num_samples):
        likely = likely.double().clone()
        out = torch.zeros(len(likely), num_samples, dtype=torch.long)
        for row, own in enumerate(draws):
            for i in range(num_samples):
                sums = likely[row].cumsum(0)
                if sums[-1] == 0:
                    raise RuntimeError("not enough to draw from: torch's multinomial has this error")
                at = torch.searchsorted(sums, torch.tensor([own.next()], dtype=torch.double) * sums[-1], right=True).clamp(max=len(sums) - 1)
                out[row, i] = at
                likely[row, at] = 0
        return out

    real, torch.multinomial = torch.multinomial, multinomial
    try:
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=True, return_dict_in_generate=True, output_scores=True, **settings)
    finally:
        torch.multinomial = real
    return {"generated": out.sequences[:, ids.shape[1]:].tolist(), "scores": out.sequences_scores.tolist()}


def ends_and_draws_case(model, wide, name, tokenizers, rng):
    vocab = model.config.vocab_size
    length, new = rng.choice([2, 3, 5]), rng.randint(3, 14)
    # Token 0 is no part of a stop string: the text of a prompt begins none.
    ids = torch.tensor([[rng.randrange(vocab) for _ in range(length)] + [0] for _ in range(rng.randint(1, 3))])
    given = {"dir": "hf_generate/" + name, "architecture": model.config.architectures[0], "input_ids": ids.tolist()}
    kind = rng.choice(["stop", "stop", "next_token", "drawn"])
    settings = {"pad_token_id": vocab - 1, "eos_token_id": rng.choice([rng.randrange(vocab), [rng.randrange(vocab), rng.randrange(vocab)]])}
    if kind != "stop" and rng.random() < 0.3:
        # Without an end token, transformers fills what a stop string has ended with -1, or continues with it.
        settings["eos_token_id"] = None
    beams = {"num_beams": rng.randint(2, 4), "length_penalty": rng.choice([0.5, 1.0, 2.0]), "early_stopping": rng.choice([True, False, "never"])}
    beams["num_return_sequences"] = rng.randint(1, beams["num_beams"])
    if rng.random() < 0.4:
        words = [[rng.randrange(1, vocab) for _ in range(rng.randint(1, 2))] for _ in range(rng.randint(1, 20))]
        settings["sequence_bias"] = [[word, rng.choice([-3.0, 1.5, 4.0])] for word in words]
    if kind != "next_token":
        settings["max_new_tokens"] = new
    if kind != "stop":
        settings["top_k"] = 0
        for rule in rng.sample(sorted(ENDS_AND_DRAWS_RULES), rng.choice([1, 1, 2, 3])):
            settings[rule] = rng.choice(ENDS_AND_DRAWS_RULES[rule])
    # With all of the entropy, rounding, and so the processor, decides about the last token, and with it about what is
    # drawn.
    by_rounding = settings.get("top_h") == 1.0
    if kind == "next_token":
        logprobs = lambda each: each.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=True, return_dict_in_generate=True,
                                              output_scores=True, **settings).scores[0].log_softmax(-1)
        out = logprobs(model)
        if by_rounding or not torch.equal(out.isinf(), logprobs(wide).isinf()):
            return None
        rows = [[value if value > float("-inf") else "-inf" for value in row] for row in out.tolist()]
        return {"in": dict(given, mode="next_token", **settings), "out": {"logprobs": rows}}
    if kind == "drawn":
        settings.update(beams)
        seed = rng.randrange(2 ** 40)
        try:
            out = drawn_beams(model, ids, settings, seed)
        except RuntimeError:
            return None
        if by_rounding or out["generated"] != drawn_beams(wide, ids, settings, seed)["generated"]:
            return None
        given.update(mode="beam", do_sample=True, seed=seed)
    else:
        file, tokenizer = rng.choice(tokenizers)
        if rng.random() < 0.7:
            settings.update(beams)
        plain = said(model, ids, dict(settings))["generated"]
        text = tokenizer.decode(rng.choice(plain), skip_special_tokens=False)
        begin = rng.randrange(max(1, len(text) - 2))
        settings["stop_strings"] = [text[begin:begin + rng.randint(1, 3)].strip()] + rng.choice([[], ["zz"], ["a"]])
        if not settings["stop_strings"][0] or "|" in settings["stop_strings"][0] or "\ufffd" in settings["stop_strings"][0]:
            return None
        out = said(model, ids, dict(settings, tokenizer=tokenizer))
        if out["generated"] != said(wide, ids, dict(settings, tokenizer=tokenizer))["generated"]:
            return None
        given.update(mode="beam" if "scores" in out else "greedy", tokenizer=file)
    scores = out.get("scores", [])
    # If so few sequences are left, transformers continues with some that have ended.
    if any(abs(score) > 1e6 for score in scores) or len(set(scores)) < len(scores):
        return None
    return {"in": dict(given, **settings), "out": out}


def make_tokenizers(vocab, rng):
    """Two that decode alone: pieces of words in the bytes of GPT-2, and in the pieces of Llama."""
    made = []
    for name, blank, letters, rest, decoder in [
            ("bytes", "\u0120", ["a", "b", "c", "z", "\u00c3", "\u00a9"], [], {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}),
            ("fallback", "\u2581", ["a", "b", "c", "z"], ["<0xC3>", "<0xA9>", "<0x61>", "d", "e", "f"],
             {"type": "Sequence", "decoders": [{"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"},
                                               {"type": "Fuse"}]})]:
        pieces = ["|"] + rest + letters + [blank]
        while len(pieces) < vocab:
            piece = rng.choice(["", "", blank]) + "".join(rng.choice(letters) for _ in range(rng.randint(1, 3)))
            if piece not in pieces:
                pieces.append(piece)
        path = os.path.join(HERE, "tokenizer_%s.json" % name)
        json_of = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": None,
                   "post_processor": None, "decoder": decoder,
                   "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
                             "fuse_unk": False, "byte_fallback": name == "fallback", "ignore_merges": False,
                             "vocab": {piece: i for i, piece in enumerate(pieces)}, "merges": []}}
        with open(path, "w", encoding="utf-8") as file:
            json.dump(json_of, file, separators=(",", ":"))
        made.append(("generation/tokenizer_%s.json" % name, PreTrainedTokenizerFast(tokenizer_file=path)))
    return made


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=18, help="for each model")
    parser.add_argument("--out", default=os.path.join(HERE, "cases.jsonl"))
    parser.add_argument("--ends_and_draws_out", default=os.path.join(HERE, "ends_and_draws.jsonl"))
    flags = parser.parse_args()
    torch.set_num_threads(1)
    rng, second = random.Random(flags.seed), random.Random(flags.seed + 1)
    tokenizers = make_tokenizers(120, random.Random(1))
    with open(flags.out, "w", encoding="utf-8") as file, open(flags.ends_and_draws_out, "w", encoding="utf-8") as more:
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
            for number in range(flags.count * 4 // 3):
                found = ends_and_draws_case(model, wide, name, tokenizers, second)
                if found is not None:
                    more.write(json.dumps(dict(id="%s/more/%d" % (name, number), **found), separators=(",", ":")) + "\n")


main()
