#include "worker/text/unigram.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <utility>

#include "absl/strings/charconv.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/text/trie.h"
#include "worker/text/unicode.h"

namespace muster::text {
namespace {

using Json = nlohmann::json;

constexpr double kUnknownPenalty = 10.0;
constexpr uint32_t kNowhere = std::numeric_limits<uint32_t>::max();

// The best way to the end of a character.
struct Best {
  double score = 0;
  // The beginning of its last piece; kNowhere: there is no way here.
  uint32_t begin = kNowhere;
  uint32_t id = 0;
};

// Returns the nearest double to 10^power; power from 0 to 308.
double PowerOfTen(int power) {
  static const auto* const powers = [] {
    auto* const all = new std::array<double, 309>;
    for (int i = 0; i < 309; ++i) {
      const std::string text = absl::StrCat("1e", i);
      absl::from_chars(text.data(), text.data() + text.size(), (*all)[i]);
    }
    return all;
  }();
  return (*powers)[power];
}

// Returns the score as the library reads it from the digits in the file: all digits as a whole
// number, which is rounded to a double and multiplied or divided by a power of ten. With 17 digits
// this is often not the nearest double, and decides between ways whose sums are otherwise equal
// ("." and ".." for "..."). Numbers are written with the fewest digits, so `exact` has those of the
// file.
double AsLibraryReads(double exact) {
  std::array<char, 64> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), std::abs(exact),
                                 std::chars_format::scientific)
                       .ptr;
  uint64_t digits = 0;
  int power = 0;
  bool is_fraction = false;
  for (const char* at = text.data(); at != end; ++at) {
    if (*at == '.') {
      is_fraction = true;
    } else if (*at == 'e') {
      int exponent = 0;
      at += at[1] == '+' ? 2 : 1;
      std::from_chars(at, end, exponent);
      power += exponent;
      break;
    } else {
      digits = digits * 10 + static_cast<uint64_t>(*at - '0');
      power -= is_fraction ? 1 : 0;
    }
  }
  auto value = static_cast<double>(digits);
  for (; power < -308; power += 308) value /= PowerOfTen(308);
  value = power < 0 ? value / PowerOfTen(-power) : value * PowerOfTen(power);
  // The library refuses numbers beyond the range of doubles.
  return std::isfinite(value) ? std::copysign(value, exact) : exact;
}

class UnigramScratch final : public Model::Scratch {
 public:
  std::vector<Best> best;
};

class Unigram final : public Model {
 public:
  struct Parts {
    Vocabulary vocabulary;
    std::vector<double> scores;
    std::optional<uint32_t> unk_id;
    bool byte_fallback;
  };

  explicit Unigram(Parts parts) : parts_(std::move(parts)) {
    std::vector<std::pair<absl::string_view, uint32_t>> entries;
    parts_.vocabulary.ForEach(
        [&](absl::string_view text, uint32_t id) { entries.emplace_back(text, id); });
    trie_ = Trie(std::move(entries));
    double lowest = std::numeric_limits<double>::infinity();
    for (const double score : parts_.scores) lowest = std::min(lowest, score);
    unknown_score_ = lowest - kUnknownPenalty;
    for (int byte = 0; byte < 256; ++byte) {
      byte_tokens_.push_back(parts_.vocabulary.Id(absl::StrFormat("<0x%02X>", byte)));
    }
  }

  absl::Status Tokenize(absl::string_view word, Scratch& scratch,
                        std::vector<Token>& tokens) const override {
    std::vector<Best>& best = static_cast<UnigramScratch&>(scratch).best;
    MUSTER_RETURN_IF_ERROR(FindBest(word, best));
    const size_t first = tokens.size();
    // Collect from the end; unknown pieces join preceding unknown ones.
    bool joins = false;
    for (auto end = static_cast<uint32_t>(word.size()); end > 0;) {
      const Best& piece = best[end];
      const bool unknown = parts_.unk_id.has_value() && piece.id == *parts_.unk_id;
      if (unknown && joins) {
        tokens.back().begin = piece.begin;
      } else {
        tokens.push_back({piece.id, piece.begin, end, unknown});
      }
      joins = unknown;
      end = piece.begin;
    }
    std::reverse(tokens.begin() + static_cast<ptrdiff_t>(first), tokens.end());
    Resolve(word, first, tokens);
    return absl::OkStatus();
  }

  std::unique_ptr<Scratch> NewScratch() const override {
    return std::make_unique<UnigramScratch>();
  }
  const Vocabulary& vocabulary() const override { return parts_.vocabulary; }

 private:
  absl::Status FindBest(absl::string_view word, std::vector<Best>& best) const {
    best.assign(word.size() + 1, Best{});
    for (size_t at = 0; at < word.size();) {
      const auto begin = static_cast<uint32_t>(at);
      NextCharacter(word, at);
      const double here = best[begin].score;
      const auto is_better = [&](size_t end, double score) {
        return best[end].begin == kNowhere || score > best[end].score;
      };
      bool has_single = false;
      uint32_t node = Trie::kRoot;
      for (size_t end = begin; end < word.size();) {
        node = trie_.Step(node, static_cast<unsigned char>(word[end]));
        if (node == Trie::kNowhere) break;
        ++end;
        const uint32_t id = trie_.Value(node);
        if (id == Trie::kNoValue) continue;
        const double score = parts_.scores[id] + here;
        if (is_better(end, score)) best[end] = {score, begin, id};
        has_single = has_single || end == at;
      }
      const double unknown = unknown_score_ + here;
      if (has_single || !is_better(at, unknown)) continue;
      if (!parts_.unk_id.has_value()) {
        return absl::FailedPreconditionError(
            absl::StrCat("the model has no unknown token (unk_id), and no piece covers \"",
                         Printable(word.substr(begin, at - begin)), "\""));
      }
      best[at] = {unknown, begin, *parts_.unk_id};
    }
    return absl::OkStatus();
  }

  // Resolves an unknown part, which may after all be a piece, or be written in bytes.
  void Resolve(absl::string_view word, size_t first, std::vector<Token>& tokens) const {
    for (size_t i = first; i < tokens.size(); ++i) {
      if (!tokens[i].unknown) continue;
      const Token token = tokens[i];
      const absl::string_view text = word.substr(token.begin, token.end - token.begin);
      if (const auto id = parts_.vocabulary.Id(text); id.has_value()) {
        tokens[i] = {*id, token.begin, token.end};
        continue;
      }
      if (!parts_.byte_fallback) continue;
      std::vector<Token> bytes;
      for (const char c : text) {
        const std::optional<uint32_t> id = byte_tokens_[static_cast<unsigned char>(c)];
        if (!id.has_value()) break;
        bytes.push_back({*id, token.begin, token.end});
      }
      if (bytes.size() < text.size()) continue;
      const auto at = tokens.begin() + static_cast<ptrdiff_t>(i);
      tokens.insert(tokens.erase(at), bytes.begin(), bytes.end());
      i += bytes.size() - 1;
    }
  }

  const Parts parts_;
  Trie trie_;
  double unknown_score_ = 0;
  std::vector<std::optional<uint32_t>> byte_tokens_;  // <0x00> to <0xFF>
};

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> MakeUnigram(Settings& settings) {
  Unigram::Parts parts;
  const std::vector<Json>& list = settings.List("vocab");
  parts.byte_fallback = settings.Bool("byte_fallback", false);
  const int64_t unk = settings.Count("unk_id", std::numeric_limits<int32_t>::max(), -1);
  MUSTER_RETURN_IF_ERROR(settings.status());
  parts.scores.reserve(list.size());
  for (const Json& piece : list) {
    if (!piece.is_array() || piece.size() != 2 || !piece[0].is_string() || !piece[1].is_number()) {
      return settings.Wrong(
          "vocab", absl::StrCat("entry ", parts.scores.size(), " must be [piece, score], is ",
                                Printable(piece.dump(-1, ' ', true), 80)));
    }
    parts.vocabulary.Add(piece[0].get<std::string>(), static_cast<uint32_t>(parts.scores.size()));
    parts.scores.push_back(piece[1].is_number_float() ? AsLibraryReads(piece[1].get<double>())
                                                      : piece[1].get<double>());
  }
  if (unk >= 0) {
    if (static_cast<size_t>(unk) >= list.size()) {
      return settings.Wrong(
          "unk_id", absl::StrCat("is ", unk, ", but the vocabulary has ", list.size(), " pieces"));
    }
    parts.unk_id = static_cast<uint32_t>(unk);
  }
  return std::make_unique<Unigram>(std::move(parts));
}

}  // namespace muster::text
