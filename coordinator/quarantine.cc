#include "coordinator/quarantine.h"

#include <algorithm>
#include <iterator>

#include "absl/strings/str_cat.h"

namespace muster::coordinator {
namespace {

constexpr size_t kMaxRestoredStrikes = 1024;

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
    DropOldStrikes(now, &it->second);
    it = it->second.strikes.empty() && it->second.until <= now ? hosts_.erase(it) : std::next(it);
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
  struck.strikes.assign(strikes.begin(), strikes.end());
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

void Quarantine::RestoreStrikes(const std::string& host, std::vector<absl::Time> strikes) {
  strikes.resize(std::min(strikes.size(), kMaxRestoredStrikes));
  hosts_[host].strikes.assign(strikes.begin(), strikes.end());
}

void Quarantine::RestoreSet(const std::string& host, absl::Duration left, absl::Time until,
                            const std::string& reason, bool automatic) {
  Entry& entry = hosts_[host];
  entry.restored_left = std::max(left, absl::ZeroDuration());
  entry.until = entry.restored_left > absl::ZeroDuration() ? until : absl::InfinitePast();
  entry.reason = reason;
  entry.automatic = automatic;
}

void Quarantine::StartTerm(absl::Time now) {
  for (auto it = hosts_.begin(); it != hosts_.end();) {
    Entry& entry = it->second;
    entry.until = std::min(entry.until, now + entry.restored_left);
    entry.restored_left = absl::ZeroDuration();
    for (absl::Time& strike : entry.strikes) strike = std::min(strike, now);
    DropOldStrikes(now, &entry);
    it = entry.strikes.empty() && entry.until <= now ? hosts_.erase(it) : std::next(it);
  }
}

void Quarantine::DropOldStrikes(absl::Time now, Entry* entry) const {
  std::deque<absl::Time>& strikes = entry->strikes;
  while (!strikes.empty() && strikes.front() + options_.window <= now) strikes.pop_front();
}

Quarantine::Host Quarantine::Describe(const Entry& entry, absl::Time now) {
  Host host;
  host.strikes.assign(entry.strikes.begin(), entry.strikes.end());
  host.until = entry.until;
  host.left = entry.restored_left;
  if (host.left == absl::ZeroDuration() && entry.until > now) host.left = entry.until - now;
  host.reason = entry.reason;
  host.automatic = entry.automatic;
  return host;
}

}  // namespace muster::coordinator
