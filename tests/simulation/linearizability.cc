#include "tests/simulation/linearizability.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"

namespace muster::simulation {
namespace {

constexpr size_t kMaxEvents = 64;

// The state after `event`, or nullopt if its answer contradicts `state`.
std::optional<int64_t> Apply(const KvEvent& event, int64_t state) {
  switch (event.kind) {
    case KvEvent::kPut:
      return event.arg;
    case KvEvent::kDelete:
      return KvEvent::kAbsent;
    case KvEvent::kGet:
      if (event.answered && event.result != state) return std::nullopt;
      return state;
    case KvEvent::kCas: {
      const bool holds = state == event.expect;
      if (event.answered && (event.result != 0) != holds) return std::nullopt;
      return holds ? event.arg : state;
    }
    case KvEvent::kAdd: {
      const int64_t sum = (state == KvEvent::kAbsent ? 0 : state) + event.arg;
      if (event.answered && event.result != sum) return std::nullopt;
      return sum;
    }
  }
  return std::nullopt;
}

}  // namespace

bool IsLinearizable(std::vector<KvEvent> events, int64_t initial) {
  std::stable_sort(events.begin(), events.end(),
                   [](const KvEvent& a, const KvEvent& b) { return a.start < b.start; });
  // A read without an answer says nothing.
  events.erase(
      std::remove_if(events.begin(), events.end(),
                     [](const KvEvent& e) { return e.kind == KvEvent::kGet && !e.answered; }),
      events.end());
  if (events.size() > kMaxEvents) {
    const absl::Time cut = events[kMaxEvents].start;
    events.resize(kMaxEvents);
    for (KvEvent& event : events) {
      if (event.end < cut) continue;
      // An operation after the cut could have caused this answer, so the answer is ignored.
      event.answered = false;
      event.end = absl::InfiniteFuture();
    }
  }
  uint64_t answered = 0;
  for (size_t i = 0; i < events.size(); ++i) answered |= events[i].answered ? uint64_t{1} << i : 0;

  absl::flat_hash_set<std::pair<uint64_t, int64_t>> seen;
  std::vector<std::pair<uint64_t, int64_t>> stack = {{0, initial}};
  while (!stack.empty()) {
    const auto [done, state] = stack.back();
    stack.pop_back();
    if ((done & answered) == answered) return true;
    if (!seen.insert({done, state}).second) continue;
    absl::Time first_end = absl::InfiniteFuture();
    for (size_t i = 0; i < events.size(); ++i) {
      if (events[i].answered && (done >> i & 1) == 0)
        first_end = std::min(first_end, events[i].end);
    }
    for (size_t i = 0; i < events.size(); ++i) {
      if ((done >> i & 1) != 0 || events[i].start > first_end) continue;
      if (const auto next = Apply(events[i], state))
        stack.push_back({done | uint64_t{1} << i, *next});
    }
  }
  return false;
}

std::string ToText(const std::vector<KvEvent>& events) {
  static const char* const kNames[] = {"put", "get", "cas", "add", "delete"};
  const auto value = [](int64_t v) {
    return v == KvEvent::kAbsent ? std::string("absent") : absl::StrCat(v);
  };
  std::string text;
  for (const KvEvent& e : events) {
    absl::StrAppend(&text, "  ", absl::ToUnixMicros(e.start), "..",
                    e.answered ? absl::StrCat(absl::ToUnixMicros(e.end)) : "?", " ", kNames[e.kind],
                    " ", value(e.arg),
                    e.kind == KvEvent::kCas ? absl::StrCat(" if ", value(e.expect)) : "",
                    e.answered ? absl::StrCat(" -> ", value(e.result)) : "", "\n");
  }
  return text;
}

}  // namespace muster::simulation
