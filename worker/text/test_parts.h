#ifndef MUSTER_WORKER_TEXT_TEST_PARTS_H_
#define MUSTER_WORKER_TEXT_TEST_PARTS_H_

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/text/aligned_text.h"

namespace muster::text {

// Returns the value, or fails the test with its status.
template <class T>
T Ok(absl::StatusOr<T> value) {
  EXPECT_TRUE(value.ok()) << value.status();
  return *std::move(value);
}

// Returns a text as one span.
inline SplitText Whole(absl::string_view text) {
  const auto size = static_cast<uint32_t>(text.size());
  SplitText split;
  split.aligned = AlignedText::Of(text);
  if (size > 0) split.spans.push_back({0, size, {0, size}});
  return split;
}

// Returns the texts of the spans.
inline std::vector<std::string> TextsOf(const SplitText& split) {
  std::vector<std::string> texts;
  for (const Span& span : split.spans) texts.emplace_back(split.TextOf(span));
  return texts;
}

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_TEST_PARTS_H_
