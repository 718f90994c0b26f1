#ifndef MUSTER_COORDINATOR_QUARANTINE_H_
#define MUSTER_COORDINATOR_QUARANTINE_H_

#include <cstddef>
#include <deque>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace muster::coordinator {

struct QuarantineOptions {
  int strikes = 3;  // this many within `window` quarantine a host; 0: never automatically
  absl::Duration window = absl::Hours(1);
  absl::Duration length = absl::Minutes(30);
};

// Whether a host that was named for the `strikes`th time within the window is quarantined, and why.
struct StrikeDecision {
  bool quarantine = false;
  std::string why;
};

// Decides about a host. `what`: why it was named this time, after "a worker". A job on one host
// (`other_hosts` false) has nowhere else to go, so its host is never quarantined.
StrikeDecision JudgeStrikes(const QuarantineOptions& options, int strikes, bool other_hosts,
                            absl::string_view what);

// The hosts of one job that were named (a worker died there, or kept a barrier waiting) or are
// quarantined. Not thread-safe.
class Quarantine {
 public:
  // The most hosts of one job that are struck or quarantined. Strikes of more hosts are not
  // counted.
  static constexpr size_t kMaxHosts = 65536;

  enum class State {
    kFree,
    kLastResort,  // quarantined automatically: used only if nothing else helps
    kBlocked,     // quarantined by an operator
  };
  struct Host {
    std::vector<absl::Time> strikes;
    absl::Duration left;  // the rest of its quarantine; zero: it is not in one
    absl::Time until;     // when that is over
    std::string reason;
    bool automatic = false;
  };
  struct Struck {
    std::vector<absl::Time> strikes;  // that count against the next time, oldest first
    StrikeDecision decision;
  };

  explicit Quarantine(const QuarantineOptions& options) : options_(options) {}

  // Adds a strike against `host`. If the decision says so, the caller quarantines it with Set.
  // Returns nullopt if strikes do not count here, or there are too many hosts.
  std::optional<Struck> Strike(const std::string& host, bool other_hosts, absl::string_view what,
                               absl::Time now);
  // A length of zero lifts a quarantine.
  void Set(const std::string& host, absl::Duration length, const std::string& reason,
           bool automatic, absl::Time now);

  State StateOf(absl::string_view host, absl::Time now) const;
  // Return when the quarantine of `host` ends, and when the next one of any host does;
  // InfiniteFuture: there is none.
  absl::Time FreeAt(absl::string_view host, absl::Time now) const;
  absl::Time NextFree(absl::Time now) const;
  bool HasRoomFor(absl::string_view host) const {
    return hosts_.size() < kMaxHosts || hosts_.contains(host);
  }

  // Called at replay; the clock may have been set back since. The times of strikes that an older
  // coordinator wrote are not known (InfiniteFuture): they count from the start of the term.
  void RestoreStrikes(const std::string& host, std::vector<absl::Time> strikes);
  void RestoreSet(const std::string& host, absl::Duration left, absl::Time until,
                  const std::string& reason, bool automatic);
  // Forgets strikes and quarantines that are over.
  void StartTerm(absl::Time now);
  void Clear() { hosts_.clear(); }

  // Calls f(name, const Host&) for each host, by name.
  template <typename F>
  void ForEach(absl::Time now, F f) const {
    for (const auto& [name, entry] : hosts_) f(name, Describe(entry, now));
  }

 private:
  struct Entry {
    std::deque<absl::Time> strikes;  // the ones that count, oldest first
    absl::Time until = absl::InfinitePast();
    // Until the term starts: the quarantine ends at most this much later than that.
    absl::Duration restored_left;
    std::string reason;
    bool automatic = false;
  };
  void DropOldStrikes(absl::Time now, Entry* entry) const;
  static Host Describe(const Entry& entry, absl::Time now);

  const QuarantineOptions options_;
  absl::btree_map<std::string, Entry> hosts_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_QUARANTINE_H_
