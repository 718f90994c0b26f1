#include "coordinator/quarantine.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace muster::coordinator {
namespace {

constexpr int kMaxRestoredStrikes = 1024;

}  // namespace

StrikeDecision JudgeStrikes(const QuarantineOptions& options, int strikes, bool other_hosts,
                            absl::string_view what) {
  const std::string named =
      absl::StrCat("named ", strikes, " times within ", absl::FormatDuration(options.window),
                   ", last because a worker ", what);
  if (strikes < options.strikes) {
    return {false, absl::StrCat(named, ": ", options.strikes, " times quarantine it")};
  }
  if (!other_hosts) return {false, absl::StrCat(named, ": but the job has no other host")};
  return {true, named};
}

std::optional<Quarantine::Struck> Quarantine::Strike(const std::string& host, bool other_hosts,
                                                     absl::string_view what, absl::Time now) {
  if (options_.strikes <= 0 || host.empty()) return std::nullopt;
  for (auto it = hosts_.begin(); it != hosts_.end();) {
    std::deque<absl::Time>& strikes = it->second.strikes;
    while (!strikes.empty() && strikes.front() + options_.window <= now) strikes.pop_front();
    it = strikes.empty() && it->second.until <= now ? hosts_.erase(it) : std::next(it);
  }
  if (!HasRoomFor(host)) return std::nullopt;
  std::deque<absl::Time>& strikes = hosts_[host].strikes;
  strikes.push_back(now);
  const size_t limit = static_cast<size_t>(options_.strikes);
  Struck struck;
  struck.decision =
      JudgeStrikes(options_, static_cast<int>(std::min(strikes.size(), limit)), other_hosts, what);
  if (struck.decision.quarantine) {
    strikes.clear();
  } else if (strikes.size() > limit) {
    strikes.pop_front();
  }
  struck.strikes = static_cast<int>(strikes.size());
  return struck;
}

void Quarantine::Set(const std::string& host, absl::Duration length, const std::string& reason,
                     bool automatic, absl::Time now) {
  Entry& entry = hosts_[host];
  entry.until = length > absl::ZeroDuration() ? now + length : absl::InfinitePast();
  entry.reason = reason;
  entry.automatic = automatic;
}

Quarantine::State Quarantine::StateOf(absl::string_view host, absl::Time now) const {
  const auto it = hosts_.find(host);
  if (it == hosts_.end() || it->second.until <= now) return State::kFree;
  return it->second.automatic ? State::kLastResort : State::kBlocked;
}

absl::Time Quarantine::FreeAt(absl::string_view host, absl::Time now) const {
  const auto it = hosts_.find(host);
  return it == hosts_.end() || it->second.until <= now ? absl::InfiniteFuture() : it->second.until;
}

absl::Time Quarantine::NextFree(absl::Time now) const {
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [host, entry] : hosts_) {
    if (entry.until > now) next = std::min(next, entry.until);
  }
  return next;
}

void Quarantine::RestoreStrikes(const std::string& host, int strikes) {
  hosts_[host].restored_strikes = std::clamp(strikes, 0, kMaxRestoredStrikes);
}

void Quarantine::RestoreSet(const std::string& host, absl::Duration left, const std::string& reason,
                            bool automatic) {
  Entry& entry = hosts_[host];
  entry.restored_left = left;
  entry.reason = reason;
  entry.automatic = automatic;
}

void Quarantine::StartTerm(absl::Time now) {
  for (auto& [host, entry] : hosts_) {
    if (entry.restored_left > absl::ZeroDuration()) entry.until = now + entry.restored_left;
    entry.strikes.assign(entry.restored_strikes, now);
    entry.restored_left = absl::ZeroDuration();
    entry.restored_strikes = 0;
  }
}

Quarantine::Host Quarantine::Describe(const Entry& entry, absl::Time now) {
  Host host;
  host.strikes = static_cast<int>(entry.strikes.size()) + entry.restored_strikes;
  host.left = entry.restored_left;
  if (entry.until > now) host.left = entry.until - now;
  host.left = std::max(host.left, absl::ZeroDuration());
  host.reason = entry.reason;
  host.automatic = entry.automatic;
  return host;
}

}  // namespace muster::coordinator
