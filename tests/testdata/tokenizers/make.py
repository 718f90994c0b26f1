"""Records what the tokenizers library (0.23.3) does with tokenizers put together at random.

usage: python3 make.py > cases.jsonl

Each line is {"model": name, "json": ...}, a model that lines below use, or {"tokenizer": tokenizer.json with the model's name,
"settings": what the model has other than there, "cases": [...]}. A case has "text", perhaps "pair", "special" (add_special_tokens) and what came out of it. What is a mistake of
the library (docs/tokenizers.md) is left out: texts of added tokens that are looked for in normalized text or are not ASCII,
added tokens of which the normalizer leaves nothing or what it leaves of another, and texts at which it panics.
"""

import json
import os
import random
import sys
import unicodedata

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

DRAW = random.Random(20260701)
TEXTS = [
    "Hello, world! It's 12345 o'clock; don't wait.", "  two  blanks\tand\ttabs\r\n\nlines ", "naïve café résumé Straße ÀÉÎ", "e\u0301 a\u030a\u0323 \u1112\u1161\u11ab 한글",
    "我们在灯塔等船。 東京タワー ｶﾞ ﾊﾟ", "Привет, мир! Ελληνικά שָׁלוֹם", "ﬁ ﬂ ½ ② Ⅷ x² 𝒜𝟙 ㌀", "👨‍👩‍👧 🇩🇪 👍🏽", "<s>a</s> [SEP][MASK] <pad>|<pad>", "\u00a0\u2003\u3000\u200b\ufeffx\u00ad",
    "İstanbul ıI ẞß", "a\0b\x07c\x1b\ufffd", "unaffable ##able .,!? 's 'LL n't", "▁▁a ▁b", "", " ", "a", "x" * 60,
]
SMALL = "the lighthouse keeper waits for the ship and the ship waits for the keeper; don't wait, it's 12 or 34, naïve café é".split()


def train(model, trainer, prepare):
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = prepare
    tokenizer.train_from_iterator([" ".join(SMALL)] * 3 + TEXTS[:8], trainer)
    return json.loads(tokenizer.to_str())["model"]


def make_models():
    special = ["<unk>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bytes_of_text = ["<0x%02X>" % i for i in range(256)]
    made = {
        "bpe": train(models.BPE(unk_token="<unk>"), trainers.BpeTrainer(vocab_size=140, special_tokens=special, show_progress=False),
                     pre_tokenizers.Metaspace()),
        "bytes": train(models.BPE(), trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False),
                       pre_tokenizers.ByteLevel()),
        "suffix": train(models.BPE(unk_token="<unk>"), trainers.BpeTrainer(
            vocab_size=160, special_tokens=special, end_of_word_suffix="</w>", show_progress=False), pre_tokenizers.Whitespace()),
        "pieces": train(models.WordPiece(unk_token="<unk>", max_input_chars_per_word=20), trainers.WordPieceTrainer(
            vocab_size=160, special_tokens=special, show_progress=False), pre_tokenizers.BertPreTokenizer()),
        "unigram": train(models.Unigram(), trainers.UnigramTrainer(
            vocab_size=120, special_tokens=special, unk_token="<unk>", show_progress=False), pre_tokenizers.Metaspace()),
        "words": train(models.WordLevel(unk_token="<unk>"), trainers.WordLevelTrainer(
            vocab_size=60, special_tokens=special, show_progress=False), pre_tokenizers.Whitespace()),
        "fallback": train(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True), trainers.BpeTrainer(
            vocab_size=380, special_tokens=special + bytes_of_text, limit_alphabet=30, show_progress=False), pre_tokenizers.Metaspace()),
        "prefix": train(models.BPE(unk_token="<unk>", continuing_subword_prefix="##"), trainers.BpeTrainer(
            vocab_size=140, special_tokens=special, continuing_subword_prefix="##", limit_alphabet=40, show_progress=False), pre_tokenizers.Whitespace()),
    }
    bytes_of_pieces = [[piece, -20 - i / 100] for i, piece in enumerate(bytes_of_text)]
    made["unigram bytes"] = dict(made["unigram"], vocab=made["unigram"]["vocab"] + bytes_of_pieces, byte_fallback=True)
    return made


def varied(model):
    """With other settings of its kind."""
    settings = {"BPE": {"fuse_unk": [True, False], "ignore_merges": [True, False], "byte_fallback": [True, False], "unk_token": [None]},
                "WordPiece": {"max_input_chars_per_word": [5, 100], "continuing_subword_prefix": ["", "##"]},
                "Unigram": {"unk_id": [0, None]}, "WordLevel": {}}[model["type"]]
    return {name: DRAW.choice(values) for name, values in settings.items() if flip(0.25)}


def flip(chance=0.5):
    return DRAW.random() < chance


BEHAVIORS = ["Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"]
PATTERNS = [r"\s+", r"\p{L}+|\p{N}+", r"\w+", r"\W", r"[0-9]{2}", r"[\p{P}\p{S}]", r"\b", "a?", r"\p{N}{1,3}", ".", r"(?i)[a-f]+", r"^|$", r"\h+",
            r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|"
            r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+",
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"]


def several(make, depth):
    return [part for part in (make(depth + 1) for _ in range(DRAW.randrange(1, 4))) if part]


def normalizer(depth=0):
    kind = DRAW.choice(["Sequence", "Prepend", "Replace", "Replace", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "StripAccents", "Lowercase", "Strip",
                        "BertNormalizer", "ByteLevel", None])
    if kind is None or (kind == "Sequence" and depth > 1):
        return None
    return {"type": kind, **{
        "Sequence": lambda: {"normalizers": several(normalizer, depth)},
        "Prepend": lambda: {"prepend": DRAW.choice(["▁", "ab"])},
        "Replace": lambda: {"pattern": DRAW.choice([{"String": DRAW.choice([" ", "a", "é"])}, {"Regex": DRAW.choice([" {2,}", r"\s+", "[^a-z]", r"\d"])}]),
                            "content": DRAW.choice(["▁", "", "xyz", " "])},
        "Strip": lambda: {"strip_left": flip(), "strip_right": flip()},
        "BertNormalizer": lambda: {"clean_text": flip(), "handle_chinese_chars": flip(), "strip_accents": DRAW.choice([None, True, False]),
                                   "lowercase": flip()},
    }.get(kind, dict)()}


def pre_tokenizer(depth=0):
    kind = DRAW.choice(["Sequence", "Split", "Split", "Split", "ByteLevel", "Metaspace", "Whitespace", "WhitespaceSplit", "BertPreTokenizer", "Digits",
                        "Punctuation", "CharDelimiterSplit", "UnicodeScripts", "FixedLength", None])
    if kind is None or (kind == "Sequence" and depth > 1):
        return None
    return {"type": kind, **{
        "Sequence": lambda: {"pretokenizers": several(pre_tokenizer, depth)},
        "Split": lambda: {"pattern": DRAW.choice([{"String": DRAW.choice([" ", "a"])}, {"Regex": DRAW.choice(PATTERNS)}]),
                          "behavior": DRAW.choice(BEHAVIORS), "invert": flip(0.3)},
        "ByteLevel": lambda: {"add_prefix_space": flip(), "trim_offsets": True, "use_regex": flip()},
        "Metaspace": lambda: {"replacement": "▁", "prepend_scheme": DRAW.choice(["first", "never", "always"]), "split": flip()},
        "Digits": lambda: {"individual_digits": flip()},
        "Punctuation": lambda: {"behavior": DRAW.choice(BEHAVIORS)},
        "CharDelimiterSplit": lambda: {"delimiter": DRAW.choice(" a")},
        "FixedLength": lambda: {"length": DRAW.randrange(1, 6)},
    }.get(kind, dict)()}


def decoder(depth=0):
    kind = DRAW.choice(["Sequence", "ByteLevel", "Replace", "ByteFallback", "Fuse", "Strip", "WordPiece", "Metaspace", "BPEDecoder", "CTC", None])
    if kind is None or (kind == "Sequence" and depth > 1):
        return None
    return {"type": kind, **{
        "Sequence": lambda: {"decoders": several(decoder, depth)},
        "ByteLevel": lambda: {"add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "Replace": lambda: {"pattern": DRAW.choice([{"String": DRAW.choice(["▁", "a"])}, {"Regex": r"\s+"}]), "content": DRAW.choice([" ", "x", ""])},
        "Strip": lambda: {"content": DRAW.choice(" a"), "start": DRAW.randrange(3), "stop": 0},
        "WordPiece": lambda: {"prefix": "##", "cleanup": flip()},
        "Metaspace": lambda: {"replacement": "▁", "prepend_scheme": DRAW.choice(["first", "never", "always"]), "split": True},
        "BPEDecoder": lambda: {"suffix": DRAW.choice(["</w>", "e"])},
        "CTC": lambda: {"pad_token": "<pad>", "word_delimiter_token": "|", "cleanup": flip()},
    }.get(kind, dict)()}


def post_processor(depth=0):
    kind = DRAW.choice(["ByteLevel", "BertProcessing", "RobertaProcessing", "TemplateProcessing", "Sequence", None])
    if kind is None or (kind == "Sequence" and depth > 0):
        return None
    blanks = {"add_prefix_space": flip(), "trim_offsets": flip()}
    first, second = ({"Sequence": {"id": name, "type_id": DRAW.randrange(3)}} for name in "AB")
    special = [{"SpecialToken": {"id": name, "type_id": DRAW.randrange(3)}} for name in ("<s>", "</s>")]
    return {"type": kind, **{
        "ByteLevel": lambda: {**blanks, "use_regex": True},
        "BertProcessing": lambda: {"sep": ["</s>", 2], "cls": ["<s>", 1]},
        "RobertaProcessing": lambda: {"sep": ["</s>", 2], "cls": ["<s>", 1], **blanks},
        "TemplateProcessing": lambda: {
            "single": DRAW.choice([[first], [special[0], first, special[1]]]),
            "pair": DRAW.choice([[first, second], [special[0], first, special[1], second, special[1]]]),
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
                               "</s>": {"id": "</s>", "ids": [2, 0], "tokens": ["</s>", "!"]}}},
        "Sequence": lambda: {"processors": [{"type": "ByteLevel", **blanks, "use_regex": True}, post_processor(1) or {"type": "ByteLevel", **blanks}]},
    }.get(kind, dict)()}


def added_tokens(size):
    contents = DRAW.sample(["ab", "<l>", "the", "a b", "é", "ABC", "[SEP]", "##able"], DRAW.randrange(0, 5))
    return [{"id": size + i, "content": content, "single_word": flip(0.3), "lstrip": flip(0.3), "rstrip": flip(0.3), "normalized": flip(0.3),
             "special": flip()} for i, content in enumerate(contents)]


def any_text():
    if flip(0.4):
        return DRAW.choice(TEXTS)
    parts = []
    for _ in range(DRAW.randrange(1, 6)):
        text = DRAW.choice(TEXTS)
        begin = DRAW.randrange(len(text) + 1)
        parts.append(text[begin:begin + DRAW.randrange(1, 12)])
        character = chr(DRAW.choice([DRAW.randrange(0x20, 0x250), DRAW.randrange(0x300, 0x3100), DRAW.randrange(0xAC00, 0xD700)]))
        if unicodedata.category(character) not in ("Cn", "Cs"):
            parts.append(character)
    return "".join(parts)


def meets(tokenizer, tokens):
    """Whether the normalizer leaves nothing of an added token, or of two the same."""
    normalize = tokenizer.normalizer.normalize_str if tokenizer.normalizer else str
    left = [normalize(token["content"]) for token in tokens if token["normalized"]]
    return "" in left or len(set(left)) < len(left)


def record(tokenizer, hides_text, text, pair, special):
    encoding = tokenizer.encode(text, pair, add_special_tokens=special)
    case = {"text": text, "special": special, "ids": encoding.ids, "tokens": encoding.tokens, "offsets": encoding.offsets,
            "type_ids": encoding.type_ids}
    if pair is not None:
        case["pair"] = pair
    known = all(tokenizer.id_to_token(i) is not None for i in encoding.ids)
    if known and not hides_text & set(encoding.ids):
        try:
            case["decoded"] = tokenizer.decode(encoding.ids, skip_special_tokens=False)
        except BaseException:
            del case["type_ids"]
    return case


def main():
    # The library writes panics to standard error.
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    known = make_models()
    for name, model in known.items():
        print(json.dumps({"model": name, "json": model}))
    made = 0
    while made < 300:
        name = DRAW.choice(list(known))
        settings = varied(known[name])
        model = dict(known[name], **settings)
        parts = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added_tokens(len(model["vocab"])),
                 "normalizer": normalizer() if flip(0.7) else None, "pre_tokenizer": pre_tokenizer() if flip(0.8) else None,
                 "post_processor": post_processor(), "decoder": decoder(), "model": name}
        try:
            tokenizer = Tokenizer.from_str(json.dumps({**parts, "model": model}))
        except BaseException:
            continue
        if meets(tokenizer, parts["added_tokens"]):
            continue
        hides_text = {tokenizer.token_to_id(token["content"]) for token in parts["added_tokens"] if token["normalized"] or not token["content"].isascii()}
        cases = []
        for _ in range(4):
            text, pair, special = any_text(), any_text() if flip(0.25) else None, flip(0.6)
            try:
                cases.append(record(tokenizer, hides_text, text, pair, special))
            except BaseException:
                pass
        if any(parts["added_tokens"][i]["content"] in model["vocab"] for i in range(len(parts["added_tokens"]))
               if isinstance(model["vocab"], dict)):
            continue
        made += 1
        print(json.dumps({"tokenizer": parts, "settings": settings, "cases": cases}))


if __name__ == "__main__":
    main()
