#include "worker/collective/progress_board.h"

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/clock.h"

namespace muster {
namespace {

// Begins the phase in which a call waits for all processes to make it, too.
constexpr absl::string_view kEntering = "entering ";

// Writes 1048576 as "1,048,576".
std::string WithCommas(int64_t number) {
  std::string text = absl::StrCat(number);
  for (int64_t at = static_cast<int64_t>(text.size()) - 3; at > 0; at -= 3) text.insert(at, ",");
  return text;
}

absl::Time TimeOf(int64_t nanoseconds) {
  return nanoseconds == 0 ? absl::InfinitePast() : absl::FromUnixNanos(nanoseconds);
}

}  // namespace

void ProgressBoard::NoteNow(std::atomic<int64_t>* time) {
  time->store(absl::ToUnixNanos(Clock::Real().Now()), std::memory_order_relaxed);
}

// Relaxed loads suffice: every field is valid independently, pointers point to literals, and a
// report may combine the name of one collective with the size of the next.
ProgressBoard::Facts ProgressBoard::Read() const {
  Facts facts;
  facts.step = step_.load(std::memory_order_relaxed);
  facts.phase = phase_.load(std::memory_order_relaxed);
  facts.restored = TimeOf(restored_.load(std::memory_order_relaxed));
  facts.progress = progress_.load(std::memory_order_relaxed);
  facts.first_step = TimeOf(first_step_.load(std::memory_order_relaxed));
  const char* const name = name_.load(std::memory_order_relaxed);
  if (name == nullptr) return facts;
  facts.last_collective = absl::StrCat(name, " #", count_.load(std::memory_order_relaxed));
  if (const int buckets = buckets_.load(std::memory_order_relaxed); buckets > 0) {
    absl::StrAppend(&facts.last_collective, " bucket ", bucket_.load(std::memory_order_relaxed),
                    " of ", buckets);
  }
  absl::string_view call = facts.phase;
  const bool going_on = going_on_.load(std::memory_order_relaxed);
  const bool enters = going_on && absl::ConsumePrefix(&call, kEntering);
  absl::StrAppend(&facts.last_collective, " (",
                  WithCommas(elements_.load(std::memory_order_relaxed)), " ",
                  dtype_.load(std::memory_order_relaxed), ")",
                  enters ? absl::StrCat(" of ", call, "()") : "", going_on ? "" : ", done");
  return facts;
}

}  // namespace muster
