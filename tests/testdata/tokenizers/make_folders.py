#!/usr/bin/env python3
"""usage: [SEED=N] [COUNT=N] [OUT=FILE] python make_folders.py

Writes folders.jsonl: folders with a small tokenizer.json, or with the older files of a GPT-2, Qwen2 or BERT, and files beside them that name tokens and roles, put together at random, and what
AutoTokenizer of transformers 5.17.0 makes of them, in the form of sentence_pieces.jsonl; the content of a file is its JSON or its text. Folders that transformers does not load are left out.
"""

import json
import os
import random
import tempfile
import warnings

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import transformers  # noqa: E402

warnings.filterwarnings("ignore")

HERE = os.path.dirname(os.path.abspath(__file__))
CONTENTS = ["<s>", "</s>", "<unk>", "<pad>", "<x>", "<new>", "a", "ab", "<img>", "b c"]
VOCABULARY = ["<unk>", "<s>", "</s>", "a", "b", "c", "ab", "▁"]
FLAGS = ["lstrip", "rstrip", "normalized", "single_word", "special"]
EXTRA = ["extra_special_tokens", "additional_special_tokens"]


def token(rng, has_type=True):
    content = rng.choice(CONTENTS)
    if rng.random() < 0.5:
        return content
    out = {"content": content}
    if has_type:
        out["__type"] = "AddedToken"
    out.update({name: rng.random() < 0.5 for name in FLAGS if rng.random() < 0.4})
    return out


def flags(rng, **likely):
    return {name: rng.random() < likely.get(name, 0.3) for name in FLAGS}


def tokenizer_of(rng):
    added = []
    if rng.random() < 0.5:
        added = [dict({name: name == "special" for name in FLAGS}, id=i, content=content) for i, content in enumerate(VOCABULARY[:3])]
    for i, content in enumerate(rng.sample(["<x>", "<pad>", "<img>"], rng.choice([0, 1, 2]))):
        added.append(dict(flags(rng, special=0.6), id=len(VOCABULARY) + i, content=content))
    model = {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None, "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False,
             "vocab": {piece: i for i, piece in enumerate(VOCABULARY)}, "merges": [["a", "b"]]}
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None, "pre_tokenizer": None, "post_processor": None, "decoder": {"type": "Fuse"}, "model": model}


def files_of(rng):
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role in ("bos_token", "eos_token", "unk_token", "pad_token", "mask_token", "cls_token", "sep_token", "image_token", "foo_token"):
        if rng.random() < 0.3:
            config[role] = token(rng) if rng.random() < 0.9 or role in ("image_token", "foo_token") else None
    for name in EXTRA:
        if rng.random() < 0.3:
            config[name] = rng.choice([[token(rng) for _ in range(rng.choice([0, 1, 2, 4]))], None, {"image_token": rng.choice(CONTENTS)} if name == EXTRA[0] else []])
    out = {"tokenizer.json": tokenizer_of(rng), "tokenizer_config.json": config}
    if rng.random() < 0.4:
        some = rng.sample([(0, "<unk>"), (1, "<s>"), (2, "</s>"), (8, "<x>"), (9, "<new>"), (10, "<img>")], rng.choice([1, 3]))
        config["added_tokens_decoder"] = {str(i): dict(flags(rng, special=0.7), content=content) for i, content in some}
    if rng.random() < 0.5:
        roles = {role: token(rng, has_type=False) for role in ("bos_token", "eos_token", "pad_token", "foo_token") if rng.random() < 0.4}
        out["special_tokens_map.json"] = roles
        for name in EXTRA:
            if rng.random() < 0.3:
                roles[name] = [token(rng, has_type=False) for _ in range(rng.choice([0, 1, 2]))]
    if rng.random() < 0.3:
        out["added_tokens.json"] = {content: 30 + i for i, content in enumerate(rng.sample(CONTENTS, 2))}
    return out


# Class and model; a Qwen2 passes over the class.
OLDER = [("GPT2Tokenizer", "gpt2"), (None, "gpt2"), ("Qwen2Tokenizer", "qwen2"), (None, "qwen2"), ("LlamaTokenizer", "qwen2"), ("Qwen2Tokenizer", None), ("BertTokenizer", "bert"),
         ("BertTokenizerFast", None)]


def older_files_of(rng):
    out = files_of(rng)
    del out["tokenizer.json"]
    config = out["tokenizer_config.json"]
    config["tokenizer_class"], model = rng.choice(OLDER)
    is_bert = model == "bert" or (config["tokenizer_class"] or "").startswith("Bert")
    if config["tokenizer_class"] is None:
        del config["tokenizer_class"]
    if model is not None:
        out["config.json"] = {"model_type": model}
    if is_bert:
        config.pop("unk_token", None)
        out["vocab.txt"] = "".join(line + "\n" for line in ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "a", "b", "##b", "c", "##c", "<s>", "</s>"])
        for role in ("cls_token", "sep_token"):
            if rng.random() < 0.2:
                config[role] = None
    else:
        words = ["a", "b", "c", "ab", "\u0120", "<", ">", "s", "x", "/", "n", "e", "w", "<|endoftext|>", "</s>"]
        out["vocab.json"] = {word: i for i, word in enumerate(words)}
        out["merges.txt"] = "#version: 0.2\na b\n"
        for name in ("add_bos_token", "add_eos_token", "add_prefix_space"):
            if rng.random() < 0.3:
                config[name] = rng.random() < 0.7
    return out


def case(rng, name, files_of):
    files = files_of(rng)
    with tempfile.TemporaryDirectory() as folder:
        for each, content in files.items():
            with open(os.path.join(folder, each), "w", encoding="utf-8") as file:
                file.write(content if isinstance(content, str) else json.dumps(content))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = []
    for _ in range(6):
        one = "".join(rng.choice(CONTENTS + ["a", "b", "c", " ", "  ", "ab"]) for _ in range(rng.randint(0, 8)))
        pair = "a" + rng.choice(CONTENTS)
        ids = tokenizer(one).input_ids
        texts.append({"text": one, "pair": pair, "ids": ids, "plain": tokenizer(one, add_special_tokens=False).input_ids, "both": tokenizer(one, pair).input_ids,
                      "decoded": tokenizer._tokenizer.decode(ids, skip_special_tokens=False), "decoded_skip": tokenizer._tokenizer.decode(ids, skip_special_tokens=True)})
    roles = {each: getattr(tokenizer, each) for each in ("bos_token", "eos_token", "unk_token", "pad_token")}
    return {"id": name, "model": "", "files": files, "vocab_size": len(tokenizer), "roles": roles, "texts": texts}


def main():
    seed, count = int(os.environ.get("SEED", "1")), int(os.environ.get("COUNT", "80"))
    with open(os.environ.get("OUT", os.path.join(HERE, "folders.jsonl")), "w", encoding="utf-8") as file:
        for kind, make in (("", files_of), ("older ", older_files_of)):
            for i in range(count):
                name = "%s%d %d" % (kind, seed, i)
                try:
                    made = case(random.Random(name), name, make)
                except (TypeError, ValueError, AttributeError):
                    continue
                file.write(json.dumps(made, separators=(",", ":")) + "\n")


main()
