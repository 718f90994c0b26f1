#include "worker/text/bpe.h"

#include <array>
#include <cstring>
#include <limits>
#include <queue>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/hash/hash.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/text/byte_alphabet.h"
#include "worker/text/unicode.h"

namespace muster::text {
namespace {

using Json = nlohmann::json;

constexpr uint32_t kNone = std::numeric_limits<uint32_t>::max();

struct Merge {
  uint32_t rank;
  uint32_t id;
};
using Merges = absl::flat_hash_map<uint64_t, Merge>;

uint64_t PairOf(uint32_t left, uint32_t right) { return uint64_t{left} << 32 | right; }

// A part of a word while it is merged.
struct Symbol {
  uint32_t id;
  uint32_t bytes;  // length in the word; 0: merged into the previous symbol
  uint32_t previous;
  uint32_t next;
  Merge merge;  // with the next symbol; rank kNone: there is none
};

// A cache of words with their tokens: only short ones, one for each slot of a table.
class WordCache {
 public:
  static constexpr size_t kMaxBytes = 30;
  static constexpr size_t kMaxTokens = 6;

  // Appends the tokens of `word` to `tokens`; false if it is not cached.
  bool Find(absl::string_view word, size_t hash, std::vector<Token>& tokens) const {
    const Slot& slot = slots_[hash % kSlots];
    if (slot.bytes != word.size() || std::memcmp(slot.word, word.data(), word.size()) != 0) {
      return false;
    }
    uint32_t begin = 0;
    for (int i = 0; i < slot.count; ++i) {
      tokens.push_back({slot.ids[i], begin, begin + slot.lengths[i]});
      begin += slot.lengths[i];
    }
    return true;
  }

  void Keep(absl::string_view word, size_t hash, const Token* tokens, size_t count) {
    if (count > kMaxTokens || count == 0) return;
    Slot& slot = slots_[hash % kSlots];
    slot.bytes = static_cast<uint8_t>(word.size());
    slot.count = static_cast<uint8_t>(count);
    std::memcpy(slot.word, word.data(), word.size());
    for (size_t i = 0; i < count; ++i) {
      slot.ids[i] = tokens[i].id;
      slot.lengths[i] = static_cast<uint8_t>(tokens[i].end - tokens[i].begin);
    }
  }

 private:
  static constexpr size_t kSlots = 1 << 14;

  struct alignas(64) Slot {
    uint32_t ids[kMaxTokens];
    uint8_t lengths[kMaxTokens];
    uint8_t bytes = 0;  // 0: empty
    uint8_t count = 0;
    char word[kMaxBytes];
  };

  std::vector<Slot> slots_ = std::vector<Slot>(kSlots);
};

class BpeScratch final : public Model::Scratch {
 public:
  std::vector<Symbol> symbols;
  WordCache cache;
};

struct Options {
  std::string unk_token;
  bool has_unk = false;
  std::string prefix;  // precedes every part of a word but the first
  std::string suffix;  // follows the last part
  bool fuse_unk = false;
  bool byte_fallback = false;
  bool ignore_merges = false;
};

// Merges the symbols of a word, by rank and from the left.
class Merger {
 public:
  Merger(const Merges& merges, std::vector<Symbol>& symbols) : merges_(merges), symbols_(symbols) {}

  void Run() {
    const auto count = static_cast<uint32_t>(symbols_.size());
    if (count < 2) return;
    for (uint32_t i = 0; i < count; ++i) {
      symbols_[i].previous = i == 0 ? kNone : i - 1;
      symbols_[i].next = i + 1 == count ? kNone : i + 1;
      symbols_[i].merge =
          i + 1 == count ? Merge{kNone, 0} : Find(symbols_[i].id, symbols_[i + 1].id);
    }
    // A scan costs less than a heap until words are long.
    if (count <= 64) {
      RunByScan();
    } else {
      RunByHeap();
    }
  }

 private:
  Merge Find(uint32_t left, uint32_t right) const {
    const auto found = merges_.find(PairOf(left, right));
    return found == merges_.end() ? Merge{kNone, 0} : found->second;
  }

  // Joins the symbol with the next one, and finds the new pairs.
  void Join(uint32_t at) {
    Symbol& left = symbols_[at];
    Symbol& right = symbols_[left.next];
    left.id = left.merge.id;
    left.bytes += right.bytes;
    right.bytes = 0;
    right.merge.rank = kNone;
    left.next = right.next;
    if (left.next != kNone) symbols_[left.next].previous = at;
    left.merge = left.next == kNone ? Merge{kNone, 0} : Find(left.id, symbols_[left.next].id);
    if (left.previous != kNone) {
      symbols_[left.previous].merge = Find(symbols_[left.previous].id, left.id);
    }
  }

  void RunByScan() {
    for (;;) {
      uint32_t best = kNone;
      uint32_t rank = kNone;
      for (uint32_t i = 0; i != kNone; i = symbols_[i].next) {
        if (symbols_[i].merge.rank >= rank) continue;
        rank = symbols_[i].merge.rank;
        best = i;
      }
      if (best == kNone) return;
      Join(best);
    }
  }

  void RunByHeap() {
    // Rank and position; an entry that is outdated when it comes up is dropped.
    std::priority_queue<uint64_t, std::vector<uint64_t>, std::greater<>> heap;
    const auto push = [&](uint32_t at) {
      if (at != kNone && symbols_[at].merge.rank != kNone) {
        heap.push(PairOf(symbols_[at].merge.rank, at));
      }
    };
    for (uint32_t i = 0; i < symbols_.size(); ++i) push(i);
    while (!heap.empty()) {
      const auto at = static_cast<uint32_t>(heap.top());
      const auto rank = static_cast<uint32_t>(heap.top() >> 32);
      heap.pop();
      if (symbols_[at].bytes == 0 || symbols_[at].merge.rank != rank) continue;
      Join(at);
      push(at);
      push(symbols_[at].previous);
    }
  }

  const Merges& merges_;
  std::vector<Symbol>& symbols_;
};

class Bpe final : public Model {
 public:
  Bpe(Vocabulary vocabulary, Merges merges, Options options)
      : vocabulary_(std::move(vocabulary)),
        merges_(std::move(merges)),
        options_(std::move(options)) {
    singles_.fill(kNone);
    for (char32_t c = 0; c < singles_.size(); ++c) {
      std::string text;
      AppendUtf8(text, c);
      singles_[c] = vocabulary_.Id(text).value_or(kNone);
    }
    for (int byte = 0; byte < 256; ++byte) {
      byte_tokens_[byte] = vocabulary_.Id(absl::StrFormat("<0x%02X>", byte)).value_or(kNone);
    }
    if (options_.has_unk) unk_id_ = vocabulary_.Id(options_.unk_token);
    MakeOfBytes();
  }

  absl::Status Tokenize(absl::string_view word, Scratch& scratch,
                        std::vector<Token>& tokens) const override {
    auto& own = static_cast<BpeScratch&>(scratch);
    if (options_.ignore_merges) {
      if (const std::optional<uint32_t> whole = vocabulary_.Id(word); whole.has_value()) {
        tokens.push_back({*whole, 0, static_cast<uint32_t>(word.size())});
        return absl::OkStatus();
      }
    }
    const bool cached = word.size() <= WordCache::kMaxBytes;
    const size_t hash = cached ? absl::Hash<absl::string_view>()(word) : 0;
    if (cached && own.cache.Find(word, hash, tokens)) return absl::OkStatus();
    own.symbols.clear();
    MUSTER_RETURN_IF_ERROR(SplitWord(word, own.symbols));
    Merger(merges_, own.symbols).Run();
    const size_t first = tokens.size();
    uint32_t begin = 0;
    for (const Symbol& symbol : own.symbols) {
      if (symbol.bytes == 0) continue;
      tokens.push_back({symbol.id, begin, begin + symbol.bytes});
      begin += symbol.bytes;
    }
    if (cached) own.cache.Keep(word, hash, tokens.data() + first, tokens.size() - first);
    return absl::OkStatus();
  }

  std::unique_ptr<Scratch> NewScratch() const override { return std::make_unique<BpeScratch>(); }
  const Vocabulary& vocabulary() const override { return vocabulary_; }
  const Model* OfBytes() const override { return of_bytes_.get(); }

 private:
  // A model with the same tokens for the bytes that their texts stand for.
  class OfBytesModel final : public Model {
   public:
    explicit OfBytesModel(const Bpe& bpe) : bpe_(bpe) {
      for (int byte = 0; byte < 256; ++byte) {
        singles_[byte] = bpe.singles_[CharacterOfByte(static_cast<unsigned char>(byte))];
      }
      if (!bpe.options_.ignore_merges) return;
      bpe.vocabulary_.ForEach([&](absl::string_view text, uint32_t id) {
        std::string bytes;
        for (size_t at = 0; at < text.size();) {
          const int byte = ByteOfCharacter(NextCharacter(text, at));
          if (byte < 0) return;
          bytes += static_cast<char>(byte);
        }
        words_.emplace(std::move(bytes), id);
      });
    }

    absl::Status Tokenize(absl::string_view word, Scratch& scratch,
                          std::vector<Token>& tokens) const override {
      auto& own = static_cast<BpeScratch&>(scratch);
      const bool cached = word.size() <= WordCache::kMaxBytes;
      const size_t hash = cached ? absl::Hash<absl::string_view>()(word) : 0;
      if (cached && own.cache.Find(word, hash, tokens)) return absl::OkStatus();
      const size_t first = tokens.size();
      if (const auto whole = words_.find(word); whole != words_.end()) {
        tokens.push_back({whole->second, 0, static_cast<uint32_t>(word.size())});
      } else {
        own.symbols.clear();
        for (const char byte : word) {
          own.symbols.push_back({singles_[static_cast<unsigned char>(byte)], 1, 0, 0, {}});
        }
        Merger(bpe_.merges_, own.symbols).Run();
        uint32_t begin = 0;
        for (const Symbol& symbol : own.symbols) {
          if (symbol.bytes == 0) continue;
          tokens.push_back({symbol.id, begin, begin + symbol.bytes});
          begin += symbol.bytes;
        }
      }
      if (cached) own.cache.Keep(word, hash, tokens.data() + first, tokens.size() - first);
      return absl::OkStatus();
    }
    std::unique_ptr<Scratch> NewScratch() const override { return bpe_.NewScratch(); }
    const Vocabulary& vocabulary() const override { return bpe_.vocabulary_; }

   private:
    const Bpe& bpe_;
    std::array<uint32_t, 256> singles_;
    absl::flat_hash_map<std::string, uint32_t> words_;  // for ignore_merges
  };

  void MakeOfBytes() {
    if (!options_.prefix.empty() || !options_.suffix.empty()) return;
    for (const char32_t c : kByteAlphabet) {
      if (singles_[c] == kNone) return;
    }
    of_bytes_ = std::make_unique<OfBytesModel>(*this);
  }

  uint32_t IdOf(absl::string_view part, char32_t c) const {
    if (part.size() == Utf8Bytes(c) && c < singles_.size()) return singles_[c];
    return vocabulary_.Id(part).value_or(kNone);
  }

  // Splits a word into characters as symbols; characters that are not in the vocabulary become
  // bytes, or unknown.
  absl::Status SplitWord(absl::string_view word, std::vector<Symbol>& symbols) const {
    const auto add = [&](uint32_t id, uint32_t bytes) { symbols.push_back({id, bytes, 0, 0, {}}); };
    uint32_t unknown = 0;  // bytes of unknown text that has no symbol yet
    std::string decorated;
    for (size_t at = 0; at < word.size();) {
      const size_t begin = at;
      const char32_t c = NextCharacter(word, at);
      const auto bytes = static_cast<uint32_t>(at - begin);
      absl::string_view part = word.substr(begin, bytes);
      const bool prefixed = begin > 0 && !options_.prefix.empty();
      const bool suffixed = at == word.size() && !options_.suffix.empty();
      if (prefixed || suffixed) {
        decorated =
            absl::StrCat(prefixed ? options_.prefix : "", part, suffixed ? options_.suffix : "");
        part = decorated;
      }
      const uint32_t id = IdOf(part, c);
      if (id != kNone) {
        if (unknown > 0) add(*unk_id_, unknown);
        unknown = 0;
        add(id, bytes);
        continue;
      }
      // As in the tokenizers library, earlier unknown text comes after these bytes.
      if (options_.byte_fallback && AddBytes(part, symbols)) continue;
      if (!options_.has_unk) continue;  // ignored
      if (!unk_id_.has_value()) {
        return absl::FailedPreconditionError(absl::StrCat(
            "the model's unknown token \"", Printable(options_.unk_token),
            "\" is not in its vocabulary, and the text has a character that is not either"));
      }
      if (unknown > 0 && !options_.fuse_unk) {
        add(*unk_id_, unknown);
        unknown = 0;
      }
      unknown += bytes;
    }
    if (unknown > 0) add(*unk_id_, unknown);
    return absl::OkStatus();
  }

  bool AddBytes(absl::string_view part, std::vector<Symbol>& symbols) const {
    for (const char c : part) {
      if (byte_tokens_[static_cast<unsigned char>(c)] == kNone) return false;
    }
    for (const char c : part) {
      symbols.push_back({byte_tokens_[static_cast<unsigned char>(c)], 1, 0, 0, {}});
    }
    return true;
  }

  const Vocabulary vocabulary_;
  const Merges merges_;
  const Options options_;
  std::optional<uint32_t> unk_id_;
  std::array<uint32_t, 0x800> singles_;    // ids of single characters
  std::array<uint32_t, 256> byte_tokens_;  // ids of <0x00> to <0xFF>
  std::unique_ptr<OfBytesModel> of_bytes_;
};

// Reads a merge as ["a", "b"] or, in older files, "a b".
absl::StatusOr<std::pair<absl::string_view, absl::string_view>> PartsOf(const Json& merge,
                                                                        const std::string& path) {
  if (merge.is_string()) {
    const std::string& text = merge.get_ref<const std::string&>();
    const std::vector<absl::string_view> parts = absl::StrSplit(text, ' ');
    if (parts.size() == 2) return std::make_pair(parts[0], parts[1]);
  } else if (merge.is_array() && merge.size() == 2 && merge[0].is_string() &&
             merge[1].is_string()) {
    return std::make_pair(absl::string_view(merge[0].get_ref<const std::string&>()),
                          absl::string_view(merge[1].get_ref<const std::string&>()));
  }
  return absl::InvalidArgumentError(
      absl::StrCat(path, ": must be two tokens, is ", Printable(merge.dump(-1, ' ', true), 80)));
}

absl::StatusOr<Merges> ReadMerges(Settings& settings, const Vocabulary& vocabulary,
                                  absl::string_view prefix) {
  const std::vector<Json>& list = settings.List("merges");
  Merges merges;
  merges.reserve(list.size());
  const std::string path = settings.PathOf("merges");
  std::string joined;
  uint32_t rank = 0;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string* const text = list[i].get_ptr<const std::string*>();
    if (text != nullptr && text->rfind("#version", 0) == 0) continue;
    MUSTER_ASSIGN_OR_RETURN(const auto parts, PartsOf(list[i], absl::StrCat(path, "[", i, "]")));
    const auto& [left, right] = parts;
    if (right.size() < prefix.size()) {
      return absl::InvalidArgumentError(absl::StrCat(
          path, "[", i, "]: \"", Printable(right), "\" is shorter than the prefix of such parts"));
    }
    joined.assign(left.data(), left.size());
    joined.append(right.data() + prefix.size(), right.size() - prefix.size());
    const std::optional<uint32_t> ids[] = {vocabulary.Id(left), vocabulary.Id(right),
                                           vocabulary.Id(joined)};
    for (int which = 0; which < 3; ++which) {
      if (ids[which].has_value()) continue;
      const absl::string_view missing[] = {left, right, joined};
      return absl::InvalidArgumentError(absl::StrCat(
          path, "[", i, "]: \"", Printable(missing[which]), "\" is not in the vocabulary"));
    }
    merges[PairOf(*ids[0], *ids[1])] = {rank++, *ids[2]};
  }
  return merges;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> MakeBpe(Settings& settings) {
  Options options;
  std::optional<std::string> unk = settings.MaybeString("unk_token");
  options.has_unk = unk.has_value();
  options.unk_token = std::move(unk).value_or("");
  options.prefix = settings.MaybeString("continuing_subword_prefix").value_or("");
  options.suffix = settings.MaybeString("end_of_word_suffix").value_or("");
  options.fuse_unk = settings.Bool("fuse_unk", false);
  options.byte_fallback = settings.Bool("byte_fallback", false);
  options.ignore_merges = settings.Bool("ignore_merges", false);
  if (const Json* const dropout = settings.Find("dropout"); dropout != nullptr && *dropout != 0) {
    return settings.NotSupported("dropout, which makes tokens random,");
  }
  const Json* const vocab = settings.Find("vocab");
  MUSTER_RETURN_IF_ERROR(settings.status());
  if (vocab == nullptr) return settings.Wrong("vocab", "is missing");
  MUSTER_ASSIGN_OR_RETURN(Vocabulary vocabulary,
                          Vocabulary::FromJson(*vocab, settings.PathOf("vocab")));
  MUSTER_ASSIGN_OR_RETURN(Merges merges, ReadMerges(settings, vocabulary, options.prefix));
  MUSTER_RETURN_IF_ERROR(settings.status());
  return std::make_unique<Bpe>(std::move(vocabulary), std::move(merges), std::move(options));
}

}  // namespace muster::text
