#ifndef MUSTER_COORDINATOR_LEASES_H_
#define MUSTER_COORDINATOR_LEASES_H_

#include <algorithm>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_set.h"
#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "base/defaults.h"
#include "coordinator/agents.h"
#include "coordinator/membership.h"
#include "coordinator/silence.h"

namespace muster::coordinator {

// How long a worker may be silent.
struct LeaseTerms {
  absl::Duration length = kDefaultLease;
  // How long a silent worker is kept beyond that while the network may be cut.
  absl::Duration outage_tolerance = kDefaultOutageTolerance;
};

// The facts that are known when it is time to look at the lease of a worker.
struct LeaseQuestion {
  LeaseTerms terms;
  absl::Time now;
  absl::Time ends;                                 // when the lease ends
  absl::Time read_until = absl::InfiniteFuture();  // all that came by then has been applied
  bool sealed = true;                              // the generation continues
  bool waits = false;                              // it has ended; the worker waits for the next
  bool silent = false;                             // its lease has run out before, and it was kept
};

struct LeaseDecision {
  enum class Kind {
    kHeld,       // the lease runs
    kReadFirst,  // received messages must be read before a worker is given up
    kEnded,      // no generation continues: the worker counts as lost, and its keys end with the
                 // lease
    kSilent,     // the worker keeps its seat for now
    kLost,       // the worker loses its seat
  };
  Kind kind = Kind::kHeld;
  std::string why;
  absl::Time again = absl::InfiniteFuture();  // when to look again
  // More than zero: how long received messages have not been read, which is too long.
  absl::Duration unread;
};

// Decides what becomes of a worker whose lease is looked at. Asks `silence` only if that decides.
LeaseDecision JudgeLease(const LeaseQuestion& question, absl::FunctionRef<Silence()> silence);

// The leases of a generation's workers: when each was heard, which are silent, and when to look at
// each again. Not thread-safe.
class Leases {
 public:
  // Both are read for every decision, and must outlive this.
  Leases(const Membership* members, Agents* agents) : members_(members), agents_(agents) {}
  Leases(const Leases&) = delete;
  Leases& operator=(const Leases&) = delete;

  // Called once, before anything else.
  void Begin(const LeaseTerms& terms) { terms_ = terms; }
  absl::Duration length() const { return terms_.length; }
  absl::Duration outage_tolerance() const { return terms_.outage_tolerance; }

  // Restart all leases: a generation begins, the coordinator has started, or its process was
  // paused.
  void BeginGeneration(absl::Time now);
  void StartTerm(absl::Time now);
  void Resume(absl::Time now) { floor_ = now; }
  // Ends the generation: no worker counts as silent any longer, and each lease that runs is judged
  // once more when it ends, so kEnded comes once for each worker.
  void EndGeneration();
  // Notes that a seat has a new worker.
  void Replace(int rank, absl::Time now);
  // Notes that the worker of a seat is gone, so it is not silent.
  void Gone(int rank);
  // Renews a lease. Returns true if its worker was silent, and no other worker is any longer.
  bool Renew(int rank, absl::Time now);

  absl::Time last_seen(int rank) const { return ranks_[rank].last_seen; }
  // How long a lost worker was silent; zero: it was not, or it was before a restart.
  absl::Duration lost_after(int rank) const { return ranks_[rank].lost_after; }
  // The time of the last sign of life of this generation, or of the restart of all leases.
  absl::Time LastHeard() const { return std::max(heard_, floor_); }
  // How much later than others a worker may be back after a cut.
  absl::Duration TimeToReturn() const { return std::max(terms_.length, kTimeToReturn); }
  // Every lease counts at least until then.
  absl::Time FloorEnds() const { return floor_ + terms_.length; }
  // Returns whether any seated worker has a lease that runs, without any time to return.
  bool AnyRuns(absl::Time now) const;
  bool Runs(const Seat& seat, absl::Time now) const {
    return seat.alive() && std::max(ranks_[seat.rank()].last_seen, floor_) + terms_.length > now;
  }

  // Returns, after the end of a generation, whether a seated worker counts as lost. It does not
  // before it has been judged, nor while it has time to return.
  bool IsOver(int rank, absl::Time now) const {
    return !ranks_[rank].awaits_end && EndOf(rank) <= now;
  }

  bool is_silent(int rank) const { return ranks_[rank].silent; }
  int silent() const { return silent_; }
  // Why the first silent worker was kept.
  const std::string& silent_why() const { return silent_why_; }
  // How long the most recently heard of the silent workers has been silent.
  absl::Duration SilentFor(absl::Time now) const;

  absl::Time NextDeadline() const {
    return checks_.empty() ? judge_at_ : std::min(checks_.begin()->first, judge_at_);
  }
  // Judges the silent workers again, because a worker has begun to wait.
  void JudgeAgain(absl::Time now) {
    if (silent_ > 0) judge_at_ = now;
  }
  // Returns the next seated worker whose lease is to be judged by `now`; nullopt: there is none.
  std::optional<int> TakeDue(absl::Time now);
  // Decides about a worker that TakeDue named, and keeps the decision, except that the worker is
  // lost: that is for Gone. `waits`: the generation has ended and the worker waits for the next.
  // `awaited`: see Silence; asked only if that decides.
  struct Outside {
    absl::Time now;
    absl::Time read_until;
    bool waits = false;
  };
  LeaseDecision Judge(int rank, const Outside& outside, absl::FunctionRef<bool()> awaited);
  // Returns whether a worker is to be judged once all received messages were read.
  bool AwaitsReading() const { return !unread_.empty(); }
  void CaughtUp(absl::Time now);

 private:
  struct Lease {
    absl::Time last_seen = absl::InfinitePast();
    absl::Duration lost_after = absl::ZeroDuration();
    bool silent = false;      // it has run out, and its worker is not given up yet
    bool awaits_end = false;  // its generation has ended in this term, and it has not run out since
  };

  absl::Time EndOf(int rank) const;
  Silence SilenceOf(int rank, absl::Time now, absl::FunctionRef<bool()> awaited);

  const Membership* const members_;
  Agents* const agents_;
  LeaseTerms terms_;
  std::vector<Lease> ranks_;
  // When to look at a rank again: lazy, never too late.
  absl::btree_set<std::pair<absl::Time, int>> checks_;
  absl::Time floor_ = absl::InfinitePast();  // every lease counts at least from here
  absl::Time heard_ = absl::InfinitePast();  // when any worker of this generation was last heard
  int silent_ = 0;                           // how many of ranks_ are
  std::string silent_why_;
  // Ranks whose lease has run out, but whose messages may not all have been read.
  std::vector<int> unread_;
  absl::Time judge_at_ = absl::InfiniteFuture();   // when to judge the silent ones again
  absl::Time returned_at_ = absl::InfinitePast();  // when the last silent worker came back
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_LEASES_H_
