#include "worker/collective/progress_board.h"

#include "absl/strings/str_cat.h"

namespace muster {

ProgressBoard::Facts ProgressBoard::Read() const {
  Facts facts;
  facts.step = step_.load(std::memory_order_relaxed);
  facts.phase = phase_.load(std::memory_order_relaxed);
  if (const char* const name = name_.load(std::memory_order_relaxed); name != nullptr) {
    facts.last_collective = absl::StrCat(name, " #", count_.load(std::memory_order_relaxed), " (",
                                         elements_.load(std::memory_order_relaxed), " ",
                                         dtype_.load(std::memory_order_relaxed), ")",
                                         going_on_.load(std::memory_order_relaxed) ? "" : ", done");
  }
  return facts;
}

}  // namespace muster
