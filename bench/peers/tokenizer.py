"""bench/tokenizer with the tokenizers library, and the files that both read.

usage: python bench/peers/tokenizer.py make DIR            trains tokenizers on this repository's text; needs no download
       python bench/peers/tokenizer.py run TEXT FILE...    measures; prints one JSON line for each measurement
"""

import json
import os
import random
import statistics
import subprocess
import sys
import time

# The measured code runs on one thread.
os.environ["TOKENIZERS_PARALLELISM"] = "true" if sys.argv[1:2] == ["make"] else "false"

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|"
          r"\s+(?!\S)|\s+")
O200K = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|"
         r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def documents():
    """The text files of this repository, and the recorded texts in many scripts, in parts of about 2,000 characters."""
    names = subprocess.run(["git", "ls-files", "*.md", "*.h", "*.cc", "*.py"], check=True, capture_output=True, text=True)
    parts = []
    for name in sorted(names.stdout.split()):
        with open(name, encoding="utf-8") as file:
            text = file.read()
        parts += [text[i:i + 2000] for i in range(0, len(text), 2000)]
    texts = []
    with open("tests/testdata/golden/hf_tokenizer.jsonl", encoding="utf-8") as file:
        for line in file:
            texts.append(json.loads(line)["in"].get("text", ""))
    text = "\n".join(texts).replace("\0", "")
    parts += [text[i:i + 2000] for i in range(0, len(text), 2000)]
    random.Random(1).shuffle(parts)
    return parts


def byte_level(pattern, size, corpus):
    tokenizer = Tokenizer(models.BPE())
    if pattern is None:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    else:
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=size, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tokenizer.add_special_tokens([AddedToken("<|endoftext|>", special=True)])
    return tokenizer


def llama2(size, corpus):
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=True)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.train_from_iterator(corpus, trainers.BpeTrainer(
        vocab_size=size, special_tokens=["<unk>", "<s>", "</s>"] + ["<0x%02X>" % i for i in range(256)],
        show_progress=False))
    return tokenizer


def bert(size, corpus):
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.train_from_iterator(corpus, trainers.WordPieceTrainer(
        vocab_size=size, special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"], show_progress=False))
    return tokenizer


def unigram(size, corpus):
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(corpus, trainers.UnigramTrainer(
        vocab_size=size, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False))
    return tokenizer


def large():
    """A file of the size of Llama 3's: 128,000 tokens and as many merges."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    draw = random.Random(2)
    vocab = {token: i for i, token in enumerate(alphabet)}
    tokens, merges = list(alphabet), []
    while len(tokens) < 128000:
        left, right = draw.choice(tokens), draw.choice(tokens)
        if len(left + right) <= 12 and left + right not in vocab:
            vocab[left + right] = len(tokens)
            tokens.append(left + right)
            merges.append((left, right))
    tokenizer = Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def make(folder):
    os.makedirs(folder, exist_ok=True)
    corpus = documents()
    with open(os.path.join(folder, "text"), "w", encoding="utf-8", newline="") as file:
        file.write("\0".join(corpus))
    sample = corpus[::4]
    # Made one after another, because some take minutes.
    makers = {"large": large, "gpt2": lambda: byte_level(None, 16000, sample),
              "llama3": lambda: byte_level(LLAMA3, 16000, sample), "o200k": lambda: byte_level(O200K, 16000, sample),
              "llama2": lambda: llama2(16000, sample), "bert": lambda: bert(16000, sample),
              "unigram": lambda: unigram(8000, sample)}
    for name, maker in makers.items():
        maker().save(os.path.join(folder, name + ".json"))


def median(rounds, act):
    walls = []
    for _ in range(rounds):
        start = time.perf_counter()
        act()
        walls.append(time.perf_counter() - start)
    return statistics.median(walls)


def run(text, files, rounds=3):
    with open(text, encoding="utf-8", newline="") as file:
        corpus = file.read().split("\0")
    size = sum(len(document.encode()) for document in corpus)
    for name in files:
        def show(what, unit, value):
            print(json.dumps({"bench": "tokenizer", "peer": "tokenizers", "tokenizer": os.path.basename(name), "what": what,
                              unit: float("%.4g" % value), "load": round(os.getloadavg()[0], 2)}), flush=True)
        show("load", "ms", 1e3 * median(3, lambda: Tokenizer.from_file(name)))
        tokenizer = Tokenizer.from_file(name)
        ids = [tokenizer.encode(document).ids for document in corpus]
        show("encode", "MB_per_s", size / 1e6 / median(rounds, lambda: [tokenizer.encode(d) for d in corpus]))
        show("encode ids alone", "MB_per_s",
             size / 1e6 / median(rounds, lambda: [tokenizer.encode_batch_fast([d])[0] for d in corpus]))
        show("decode", "MB_per_s", size / 1e6 / median(rounds, lambda: [tokenizer.decode(i) for i in ids]))


if __name__ == "__main__":
    if len(sys.argv) == 3 and sys.argv[1] == "make":
        make(sys.argv[2])
    elif len(sys.argv) > 3 and sys.argv[1] == "run":
        run(sys.argv[2], sys.argv[3:])
    else:
        sys.exit(__doc__)
