#include "worker/text/encoding_ops.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace muster::text {
namespace {

// Calls `act` (list, ...) with corresponding lists of the encodings.
template <typename Act, typename... Encodings>
void ForEachList(Act act, Encodings&... encodings) {
  act(encodings.ids...);
  act(encodings.type_ids...);
  act(encodings.tokens...);
  act(encodings.offsets...);
  act(encodings.special_tokens_mask...);
  act(encodings.attention_mask...);
}

Encoding Window(const Encoding& encoding, int64_t begin, int64_t end) {
  Encoding window;
  ForEachList(
      [&](const auto& from, auto& to) { to.assign(from.begin() + begin, from.begin() + end); },
      encoding, window);
  return window;
}

void AppendLists(Encoding& encoding, const Encoding& other) {
  ForEachList([](auto& to, const auto& from) { to.insert(to.end(), from.begin(), from.end()); },
              encoding, other);
}

void PadOne(Encoding& encoding, int64_t length, const Padding& padding) {
  for (Encoding& window : encoding.overflowing) PadOne(window, length, padding);
  const int64_t missing = length - static_cast<int64_t>(encoding.size());
  if (missing <= 0) return;
  const auto put = [&](auto& list, const auto& value) {
    list.insert(padding.direction == TextSide::kLeft ? list.begin() : list.end(),
                static_cast<size_t>(missing), value);
  };
  put(encoding.ids, padding.pad_id);
  put(encoding.type_ids, padding.pad_type_id);
  put(encoding.tokens, padding.pad_token);
  put(encoding.offsets, Encoding::Offsets{});
  put(encoding.special_tokens_mask, int64_t{1});
  put(encoding.attention_mask, int64_t{0});
}

}  // namespace

absl::Status Truncate(Encoding& encoding, int64_t length, const Truncation& truncation) {
  const auto size = static_cast<int64_t>(encoding.size());
  if (length >= size) return absl::OkStatus();
  if (length == 0) {
    Encoding all = std::move(encoding);
    encoding = Encoding();
    encoding.overflowing.push_back(std::move(all));
    return absl::OkStatus();
  }
  if (truncation.stride >= length) {
    return absl::InvalidArgumentError(absl::StrCat("truncation: a stride of ", truncation.stride,
                                                   " leaves no progress in windows of ", length,
                                                   " tokens; it must be smaller"));
  }
  const int64_t step = length - truncation.stride;
  std::vector<Encoding> windows;
  if (truncation.direction == TextSide::kRight) {
    for (int64_t begin = 0;; begin += step) {
      const int64_t end = std::min(begin + length, size);
      windows.push_back(Window(encoding, begin, end));
      if (end == size) break;
    }
  } else {
    for (int64_t end = size;; end -= step) {
      const int64_t begin = std::max<int64_t>(end - length, 0);
      windows.push_back(Window(encoding, begin, end));
      if (begin == 0) break;
    }
  }
  encoding = std::move(windows.front());
  windows.erase(windows.begin());
  encoding.overflowing = std::move(windows);
  return absl::OkStatus();
}

absl::Status Truncate(Encoding& encoding, Encoding* pair, int64_t length,
                      const Truncation& truncation) {
  const auto first = static_cast<int64_t>(encoding.size());
  const auto second = pair == nullptr ? 0 : static_cast<int64_t>(pair->size());
  const auto truncate_both = [&](int64_t to_first, int64_t to_second) -> absl::Status {
    absl::Status status = Truncate(encoding, to_first, truncation);
    return status.ok() && pair != nullptr ? Truncate(*pair, to_second, truncation) : status;
  };
  if (length == 0) return truncate_both(0, 0);
  const int64_t excess = first + second - length;
  if (excess <= 0) return absl::OkStatus();
  if (truncation.strategy == Truncation::Strategy::kLongestFirst) {
    if (pair == nullptr) return Truncate(encoding, length, truncation);
    int64_t shorter = std::min(first, second);
    int64_t longer = shorter > length ? shorter : std::max(shorter, length - shorter);
    if (shorter + longer > length) {
      shorter = length / 2;
      longer = shorter + length % 2;
    }
    return first > second ? truncate_both(longer, shorter) : truncate_both(shorter, longer);
  }
  const bool only_first = truncation.strategy == Truncation::Strategy::kOnlyFirst;
  if (!only_first && pair == nullptr) {
    return absl::InvalidArgumentError(
        "truncation: the strategy only_second needs a second text, and there is none");
  }
  const int64_t size = only_first ? first : second;
  if (size <= excess) {
    return absl::InvalidArgumentError(absl::StrCat(
        "truncation: the ", only_first ? "first" : "second", " text of ", size,
        " tokens is too short to take off the ", excess, " that are too many for max_length"));
  }
  return Truncate(only_first ? encoding : *pair, size - excess, truncation);
}

void Append(Encoding& encoding, const Encoding& other) {
  std::vector<Encoding> windows;
  const auto keep_joined = [&](Encoding first, const Encoding& second) {
    Append(first, second);
    windows.push_back(std::move(first));
  };
  for (const Encoding& window : encoding.overflowing) {
    keep_joined(window, other);
    for (const Encoding& second : other.overflowing) keep_joined(window, second);
  }
  for (const Encoding& second : other.overflowing) {
    Encoding first;
    AppendLists(first, encoding);
    // In the tokenizers library, too, only these windows of a first text get its own windows again.
    first.overflowing = encoding.overflowing;
    keep_joined(std::move(first), second);
  }
  AppendLists(encoding, other);
  encoding.overflowing = std::move(windows);
}

void Pad(std::vector<Encoding>& encodings, const Padding& padding) {
  int64_t length = padding.length.value_or(0);
  if (!padding.length.has_value()) {
    for (const Encoding& encoding : encodings) {
      length = std::max(length, static_cast<int64_t>(encoding.size()));
    }
  }
  if (const int64_t multiple = padding.pad_to_multiple_of; multiple > 0) {
    length += (multiple - length % multiple) % multiple;
  }
  for (Encoding& encoding : encodings) PadOne(encoding, length, padding);
}

}  // namespace muster::text
