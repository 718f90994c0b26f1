#include "worker/text/pcre2_pattern.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <unicode/uchar.h>
#include <unicode/uversion.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "worker/text/unicode.h"

namespace muster::text {
namespace {

constexpr int kPcre2Unicode = 14;  // of 10.42
// The limit of backtracking steps of one match, about 0.1 s, and of the memory for them.
constexpr uint32_t kMatchSteps = 10'000'000;
constexpr uint32_t kMatchKib = 64 << 10;

struct Free {
  void operator()(pcre2_code* code) const { pcre2_code_free(code); }
  void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
  void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
};
template <typename T>
using Owned = std::unique_ptr<T, Free>;

class Pcre2Pattern final : public Pattern {
 public:
  Pcre2Pattern(Owned<pcre2_code> code, Owned<pcre2_match_context> limits)
      : code_(std::move(code)), limits_(std::move(limits)) {}

  absl::Status Find(absl::string_view text, std::vector<Piece>& pieces) const override {
    if (text.empty()) return absl::OkStatus();
    const Owned<pcre2_match_data> found(pcre2_match_data_create(1, nullptr));
    if (found == nullptr) return absl::ResourceExhaustedError("no memory for a match");
    const size_t* const range = pcre2_get_ovector_pointer(found.get());
    size_t done = 0;
    size_t last_end = absl::string_view::npos;
    for (size_t at = 0; at <= text.size();) {
      const int result = Match(text, at, found.get());
      if (result == PCRE2_ERROR_NOMATCH) break;
      if (result < 0) {
        return absl::ResourceExhaustedError(absl::StrCat(
            "a regular expression gave up on a text of ", text.size(), " bytes (PCRE2 error ",
            result, "): it needs too many steps or too much memory"));
      }
      const size_t begin = range[0];
      const size_t end = range[1];
      if (begin == end && end == last_end) {
        if (at == text.size()) break;
        NextCharacter(text, at);
        continue;
      }
      if (done < begin) Add(pieces, done, begin, false);
      Add(pieces, begin, end, true);
      done = at = last_end = end;
    }
    if (done < text.size()) Add(pieces, done, text.size(), false);
    return absl::OkStatus();
  }

 private:
  static void Add(std::vector<Piece>& pieces, size_t begin, size_t end, bool match) {
    pieces.push_back({static_cast<uint32_t>(begin), static_cast<uint32_t>(end), match});
  }

  int Match(absl::string_view text, size_t at, pcre2_match_data* found) const {
    const auto* const bytes = reinterpret_cast<PCRE2_SPTR>(text.data());
    const int result =
        pcre2_match(code_.get(), bytes, text.size(), at, PCRE2_NO_UTF_CHECK, found, limits_.get());
    if (result != PCRE2_ERROR_JIT_STACKLIMIT) return result;
    // The interpreter has its stack on the heap.
    return pcre2_match(code_.get(), bytes, text.size(), at, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT,
                       found, limits_.get());
  }

  // Matches only read both.
  const Owned<pcre2_code> code_;
  const Owned<pcre2_match_context> limits_;
};

}  // namespace

bool HasNewerThanPcre2(absl::string_view text) {
  for (size_t at = 0; at < text.size();) {
    // Most texts have no characters of four bytes, and only two characters of three bytes are
    // newer, U+0CF3 and U+0ECE.
    const auto first = static_cast<unsigned char>(text[at]);
    if (first < 0xE0) {
      at += first < 0x80 ? 1 : 2;
      continue;
    }
    if (first > 0xE0 && first < 0xF0) {
      at += 3;
      continue;
    }
    UVersionInfo age;
    u_charAge(static_cast<UChar32>(NextCharacter(text, at)), age);
    if (age[0] > kPcre2Unicode) return true;
  }
  return false;
}

std::unique_ptr<Pattern> MakePcre2Pattern(absl::string_view expression) {
  int error = 0;
  size_t where = 0;
  Owned<pcre2_code> code(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(expression.data()),
                                       expression.size(), PCRE2_UTF | PCRE2_UCP, &error, &where,
                                       nullptr));
  Owned<pcre2_match_context> limits(pcre2_match_context_create(nullptr));
  if (code == nullptr || limits == nullptr) return nullptr;
  pcre2_set_match_limit(limits.get(), kMatchSteps);
  pcre2_set_heap_limit(limits.get(), kMatchKib);
  // If memory cannot be made executable, the expression is interpreted.
  pcre2_jit_compile(code.get(), PCRE2_JIT_COMPLETE);
  return std::make_unique<Pcre2Pattern>(std::move(code), std::move(limits));
}

}  // namespace muster::text
