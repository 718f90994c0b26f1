#include "examples/finetune/packed_text.h"

#include <algorithm>
#include <vector>

#include "ATen/ops/empty.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace {

// A line that divides documents. Lines may end as on Windows.
struct BlankLine {
  absl::string_view Find(absl::string_view text, size_t from) const {
    for (size_t end = text.find('\n', from); end != text.npos; end = text.find('\n', end + 1)) {
      const absl::string_view next = text.substr(end + 1, 2);
      const size_t length = absl::StartsWith(next, "\n") ? 1 : next == "\r\n" ? 2 : 0;
      if (length == 0) continue;
      const size_t begin = end > from && text[end - 1] == '\r' ? end - 1 : end;
      return text.substr(begin, end + 1 + length - begin);
    }
    return text.substr(text.size());
  }
};

}  // namespace

absl::StatusOr<at::Tensor> PackText(absl::string_view text, const muster::Tokenizer& tokenizer,
                                    int64_t row, int64_t end_token) {
  std::vector<muster::TextInput> documents;
  for (const absl::string_view document :
       absl::StrSplit(text, BlankLine(), absl::SkipWhitespace())) {
    documents.emplace_back(document);
  }
  muster::EncodeOptions options;
  // Adds neither the template's tokens, which would come with every document, nor a length.
  options.add_special_tokens = false;
  options.limits_of_file = false;
  auto encodings = tokenizer.EncodeBatch(documents, options);
  if (!encodings.ok()) return encodings.status();
  std::vector<int64_t> tokens;
  for (const muster::Encoding& encoding : *encodings) {
    tokens.insert(tokens.end(), encoding.ids.begin(), encoding.ids.end());
    if (end_token >= 0) tokens.push_back(end_token);
  }
  const int64_t rows = static_cast<int64_t>(tokens.size()) / row;
  if (rows == 0) {
    return absl::InvalidArgumentError(absl::StrCat("the text has ", tokens.size(),
                                                   " tokens, less than one row of ", row,
                                                   ": take shorter rows (--context) or more text"));
  }
  at::Tensor packed = at::empty({rows, row}, c10::kLong);
  std::copy_n(tokens.begin(), rows * row, packed.mutable_data_ptr<int64_t>());
  return packed;
}
