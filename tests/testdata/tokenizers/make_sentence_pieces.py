#!/usr/bin/env python3
"""usage: [SEED=N] [COUNT=N] [OUT=FILE] python make_sentence_pieces.py

Writes sentence_pieces.jsonl: folders with a tokenizer.model and no tokenizer.json, whose models sentencepiece (0.2.3) trains on made-up text with settings at random, and
what AutoTokenizer of transformers 5.17.0 makes of them: ids of texts, and the texts back. `files`: the text of each file of the folder, `model`: tokenizer.model in base64.
"""

import base64
import io
import json
import os
import random
import tempfile
import warnings

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
import sentencepiece  # noqa: E402
import transformers  # noqa: E402

warnings.filterwarnings("ignore")

HERE = os.path.dirname(os.path.abspath(__file__))
SYLLABLES = ["ka", "lo", "mi", "ten", "shu", "ra", "é", "ß", "日", "本", "the", "ing", "a", "b", "12", "3", "Ö", "fi", "о", "ж", "e\u0301", "\U0001f600"]
SYMBOLS = ["<sep>", "<mask>", "XY", "▁▁", "ka lo", "日", "  ", "\n", "<pad>", "a"]
CONTROLS = ["<ctl>", "[INST]", "<pad>", "b"]
ODD = [" ", "  ", "\n", "\t", "▁", "▁ ▁", "<s>", "</s>", "<unk>", "<0x41>", "\u0000", "\u00a0", "\u2028", "Q", "한", "\u0300", "<x>", "<new>", "", ".", ",", "'s"] + SYMBOLS + CONTROLS


def train(rng):
    words = ["".join(rng.choice(SYLLABLES) for _ in range(rng.randint(1, 4))) for _ in range(60)]
    sentences = [" ".join(rng.choice(words) for _ in range(rng.randint(3, 12))) for _ in range(300)]
    fallback = rng.random() < 0.7
    settings = dict(model_type="bpe", vocab_size=rng.choice([300, 340, 400]) if fallback else rng.choice([60, 120]), byte_fallback=fallback, hard_vocab_limit=False,
                    character_coverage=rng.choice([1.0, 0.99]), normalization_rule_name="identity")
    if rng.random() < 0.5:
        settings["user_defined_symbols"] = rng.sample(SYMBOLS, rng.choice([1, 2, 3]))
    if rng.random() < 0.4:
        settings["control_symbols"] = [each for each in rng.sample(CONTROLS, 2) if each not in settings.get("user_defined_symbols", [])]
    if rng.random() < 0.2:
        settings.update(bos_piece="<bos>", eos_piece="<eos>")
    if rng.random() < 0.2:
        settings.update(unk_id=1, bos_id=0)
    if rng.random() < 0.2:
        settings.update(bos_id=-1)
    if rng.random() < 0.3:
        settings.update(treat_whitespace_as_suffix=rng.random() < 0.5, split_by_whitespace=rng.random() < 0.5, allow_whitespace_only_pieces=True, split_digits=True)
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(sentence_iterator=iter(sentences), model_writer=out, minloglevel=2, **settings)
    return out.getvalue(), words


def token(rng, content):
    if rng.random() < 0.5:
        return content
    out = {"__type": "AddedToken", "content": content}
    for name in ("lstrip", "rstrip", "normalized", "single_word", "special"):
        if rng.random() < 0.4:
            out[name] = rng.random() < 0.5
    return out


def files_of(rng):
    config = {"tokenizer_class": rng.choice(["LlamaTokenizer", "LlamaTokenizerFast"])}
    for name, values in [("legacy", [True, False, None]), ("add_prefix_space", [True, False, None]), ("add_bos_token", [True, True, False, None]), ("add_eos_token", [True, False, None]),
                         ("bos_token", ["<s>", "<new>", None, "<ctl>"]), ("eos_token", ["</s>", "a", None]), ("unk_token", ["<unk>", None]), ("pad_token", ["<pad>", "<x>", "XY"])]:
        if rng.random() < 0.4:
            value = rng.choice(values)
            config[name] = token(rng, value) if isinstance(value, str) else value
    if rng.random() < 0.3:
        config[rng.choice(["extra_special_tokens", "additional_special_tokens"])] = rng.choice([[], None, ["<x>", "ka"], [token(rng, "<x>"), token(rng, "<s>")]])
    out = {"tokenizer_config.json": config}
    if rng.random() < 0.4:
        config["added_tokens_decoder"] = {str(i): {"content": content, "lstrip": rng.random() < 0.3, "rstrip": rng.random() < 0.3, "normalized": rng.random() < 0.5,
                                                   "single_word": rng.random() < 0.2, "special": rng.random() < 0.7}
                                          for i, content in rng.sample([(0, "<unk>"), (1, "<s>"), (2, "</s>"), (400, "<x>"), (401, "<new>")], rng.choice([1, 3, 5]))}
    elif rng.random() < 0.5:
        plain = {"lstrip": False, "normalized": rng.random() < 0.5, "rstrip": rng.random() < 0.3, "single_word": False}
        out["special_tokens_map.json"] = {"bos_token": dict(plain, content="<s>"), "eos_token": "</s>", "unk_token": dict(plain, content="<unk>")}
        if rng.random() < 0.3:
            out["special_tokens_map.json"]["additional_special_tokens"] = ["<x>"]
        if rng.random() < 0.4:
            out["added_tokens.json"] = {"<x>": 400, "<new>": 401}
    if rng.random() < 0.5:
        out["config.json"] = {"model_type": "llama"}
    return out


def text(rng, words):
    return "".join(rng.choice([rng.choice(words), rng.choice(ODD), " "]) for _ in range(rng.randint(0, 14)))


def case(rng, name):
    model, words = train(rng)
    files = files_of(rng)
    with tempfile.TemporaryDirectory() as folder:
        with open(os.path.join(folder, "tokenizer.model"), "wb") as file:
            file.write(model)
        for each, content in files.items():
            with open(os.path.join(folder, each), "w", encoding="utf-8") as file:
                json.dump(content, file)
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        assert type(tokenizer).__name__ == "LlamaTokenizer"
        texts = []
        for _ in range(int(os.environ.get("TEXTS", "12"))):
            one, pair = text(rng, words), text(rng, words) + "a"  # An empty one is none to transformers.
            ids = tokenizer(one).input_ids
            plain = tokenizer(one, add_special_tokens=False).input_ids
            both = tokenizer(one, pair)
            texts.append({"text": one, "pair": pair, "ids": ids, "plain": plain, "both": both.input_ids, "decoded": tokenizer._tokenizer.decode(ids, skip_special_tokens=False),
                          "decoded_skip": tokenizer._tokenizer.decode(ids, skip_special_tokens=True)})
        roles = {each: getattr(tokenizer, each) for each in ("bos_token", "eos_token", "unk_token", "pad_token")}
        return {"id": name, "model": base64.b64encode(model).decode(), "files": files, "vocab_size": len(tokenizer), "roles": roles, "texts": texts}


def main():
    seed, count = int(os.environ.get("SEED", "1")), int(os.environ.get("COUNT", "24"))
    with open(os.environ.get("OUT", os.path.join(HERE, "sentence_pieces.jsonl")), "w", encoding="utf-8") as file:
        for i in range(count):
            file.write(json.dumps(case(random.Random("%d %d" % (seed, i)), "%d %d" % (seed, i)), separators=(",", ":")) + "\n")


main()
