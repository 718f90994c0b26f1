#ifndef MUSTER_WORKER_TEXT_WORD_PATTERNS_H_
#define MUSTER_WORKER_TEXT_WORD_PATTERNS_H_

#include <memory>

#include "absl/strings/string_view.h"
#include "worker/text/pattern.h"

namespace muster::text {

// A matcher written by hand for an expression that many tokenizers share (those of GPT-2, Llama 3
// and Qwen 2); nullptr for any other. It finds exactly what the expression finds, ten times faster.
std::unique_ptr<Pattern> KnownWordPattern(absl::string_view expression);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_WORD_PATTERNS_H_
