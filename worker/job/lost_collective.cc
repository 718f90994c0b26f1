#include "worker/job/lost_collective.h"

#include <algorithm>
#include <exception>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "base/barrier_names.h"
#include "base/text.h"
#include "c10/util/Exception.h"
#include "worker/collective/collective_error.h"

namespace muster {
namespace {

// The age up to which the coordinator's facts are not called old.
constexpr absl::Duration kFresh = absl::Seconds(6);

constexpr absl::string_view kWithin = " within ";

bool GoesOn(absl::string_view collective) {
  return !collective.empty() && !absl::EndsWith(collective, ", done");
}

// Returns a collective without bucket and number of elements: ranks that call with other shapes, or
// wait for another bucket of the same gradient exchange, are in the same call.
absl::string_view Call(absl::string_view collective) {
  collective = collective.substr(0, collective.find(" ("));
  return collective.substr(0, collective.find(" bucket "));
}

std::string Ranks(const std::vector<int>& ranks) {
  constexpr size_t kShown = 16;
  std::string text = absl::StrCat(
      ranks.size() == 1 ? "rank " : "ranks ",
      absl::StrJoin(ranks.begin(), ranks.begin() + std::min(ranks.size(), kShown), ", "));
  if (ranks.size() > kShown) absl::StrAppend(&text, " and ", ranks.size() - kShown, " more");
  return text;
}

std::string Where(const MemberInfo& member) {
  if (!member.gone.empty()) return member.gone;
  std::string text =
      member.phase.empty() ? "it runs" : absl::StrCat("it is in phase '", member.phase, "'");
  absl::StrAppend(&text, " after step ", member.step);
  if (!member.last_collective.empty()) {
    absl::StrAppend(&text, ", last collective ", member.last_collective);
  }
  if (member.heartbeat_age > kFresh) {
    absl::StrAppend(&text, ", last heard of ",
                    absl::FormatDuration(absl::Trunc(member.heartbeat_age, absl::Seconds(1))),
                    " ago");
  }
  return text;
}

// Follows a description of ranks, some of which ended as if there were nothing left to do.
constexpr absl::string_view kEndedEarlier =
    "; a rank whose program has ended cannot follow the others: all ranks must run the same number "
    "of steps and collectives (accelerator.join_uneven_inputs() is for ranks with fewer batches)";

bool EndedInPeace(const MemberInfo& member) {
  return member.gone == "it has left the job" || member.gone == "it has exited with code 0";
}

// Describes ranks of the job outside of the group that failed: they may be why one of `ranks` has
// left, or has ended with an error of its own. Empty if there are none.
std::string FailedElsewhere(const std::vector<MemberInfo>& members, const std::vector<int>& ranks) {
  constexpr int kNamed = 8;
  std::string text;
  int named = 0;
  for (const MemberInfo& member : members) {
    if (member.gone.empty() || EndedInPeace(member)) continue;
    if (std::find(ranks.begin(), ranks.end(), member.rank) != ranks.end()) continue;
    if (++named > kNamed) continue;
    absl::StrAppend(&text, text.empty() ? "; outside of this group, " : "; ", "rank ", member.rank,
                    " (", member.host, ", pid ", member.pid, "): ", member.gone);
  }
  if (named > kNamed) absl::StrAppend(&text, "; and ", named - kNamed, " more");
  return text;
}

std::string What(const ProgressBoard::Facts& mine) {
  if (!GoesOn(mine.last_collective)) {
    return absl::StrCat("the exchange of phase '", mine.phase, "' after step ", mine.step);
  }
  return absl::StrCat(mine.last_collective, " after step ", mine.step);
}

// Says that the collective did not finish, and what ended it.
std::string DidNotFinish(const ProgressBoard::Facts& mine, const LostCollectiveSources& sources,
                         bool timed_out) {
  if (!timed_out) return absl::StrCat(What(mine), kConnectionLost);
  return absl::StrCat(What(mine), kDidNotFinish, absl::FormatDuration(sources.timeout));
}

std::string AllWait(const ProgressBoard::Facts& mine, const LostCollectiveSources& sources,
                    const std::vector<int>& ranks, bool timed_out) {
  return absl::StrCat(DidNotFinish(mine, sources, timed_out), " though all of ", Ranks(ranks),
                      " wait in it: look at the network between them");
}

// Whether a rank waits in the same place as this one. The phase covers collectives that bypass the
// board (a GPU's, which are complete for the host once they are queued).
bool Waits(const MemberInfo& member, const ProgressBoard::Facts& mine) {
  if (!member.gone.empty() || Call(member.last_collective) != Call(mine.last_collective)) {
    return false;
  }
  if (GoesOn(mine.last_collective)) return GoesOn(member.last_collective);
  return member.phase == mine.phase && member.step == mine.step;
}

// Asks the store: ranks that wait leave a note there and wait for each other's notes, so those
// without one are missing.
std::string AskStore(const LostCollectiveSources& sources, const ProgressBoard::Facts& mine,
                     bool timed_out) {
  const auto key = [&](int rank) {
    return absl::StrCat("muster/lost/", Call(mine.last_collective), "/", rank);
  };
  std::vector<int> waiting, missing;
  try {
    std::vector<std::string> keys;
    for (const int rank : sources.ranks) keys.push_back(key(rank));
    sources.store->set(key(sources.rank), std::vector<uint8_t>{1});
    try {
      sources.store->wait(keys, absl::ToChronoMilliseconds(sources.grace));
    } catch (const c10::Error&) {
      // Some ranks have left none: the next calls find out which.
    }
    for (const int rank : sources.ranks) {
      (sources.store->check({key(rank)}) ? waiting : missing).push_back(rank);
    }
  } catch (const std::exception&) {
    return absl::StrCat(DidNotFinish(mine, sources, timed_out),
                        ", and the store that records which ranks are missing is gone");
  }
  if (missing.empty()) {
    return AllWait(mine, sources, waiting, timed_out);
  }
  return absl::StrCat(
      Ranks(missing), " ", kDidNotTakePart, What(mine),
      timed_out ? absl::StrCat(kWithin, absl::FormatDuration(sources.timeout)) : "", "; ",
      Ranks(waiting), waiting.size() == 1 ? " waits" : " wait",
      "; only a coordinator knows where the missing ones are: start the job with muster launch");
}

}  // namespace

std::string DescribeLostCollective(const ProgressBoard::Facts& mine,
                                   const LostCollectiveSources& sources,
                                   const std::vector<MemberInfo>& members, bool timed_out) {
  constexpr int kNamed = 8;
  const auto member_of = [&](int rank) {
    return std::find_if(members.begin(), members.end(),
                        [&](const MemberInfo& m) { return m.rank == rank; });
  };
  const auto is_gone = [&](int rank) {
    const auto member = member_of(rank);
    return member != members.end() && !member->gone.empty();
  };
  std::vector<int> ranks = sources.ranks;
  // A rank that is gone ends the collective for all others at once. The facts about these are as
  // old as their last heartbeats, so they may well have waited.
  const bool ended_by_gone = !timed_out && std::any_of(ranks.begin(), ranks.end(), is_gone);
  if (ended_by_gone) std::stable_partition(ranks.begin(), ranks.end(), is_gone);
  std::vector<int> waiting;
  std::string absent;
  int named = 0;
  // Name all that are gone: one that was killed is itself the cause.
  int gone = 0, ended_earlier = 0;
  for (const int rank : ranks) {
    const auto member = member_of(rank);
    const bool here = rank == sources.rank || (member != members.end() && Waits(*member, mine));
    if (here) {
      waiting.push_back(rank);
      continue;
    }
    if (member != members.end() && !member->gone.empty()) ++gone;
    if (member != members.end() && EndedInPeace(*member)) ++ended_earlier;
    if (++named > kNamed) continue;
    absl::StrAppend(&absent, absent.empty() ? "" : "; ", "rank ", rank);
    if (member == members.end()) {
      absl::StrAppend(&absent, ", of which nothing is known, ");
    } else {
      absl::StrAppend(&absent, " (", member->host, ", pid ", member->pid, ") ");
    }
    absl::StrAppend(
        &absent,
        ended_by_gone && !is_gone(rank) ? "was not yet known to wait in " : kDidNotTakePart,
        named == 1 ? What(mine) : "it");
    // No rank waits that long for one that is gone.
    if (timed_out && named == 1 && !is_gone(rank)) {
      absl::StrAppend(&absent, kWithin, absl::FormatDuration(sources.timeout));
    }
    if (member != members.end()) absl::StrAppend(&absent, ": ", Where(*member));
  }
  const std::string elsewhere = FailedElsewhere(members, ranks);
  if (absent.empty()) {
    return AllWait(mine, sources, waiting, timed_out) + elsewhere;
  }
  if (named > kNamed) absl::StrAppend(&absent, "; and so for ", named - kNamed, " more");
  return absl::StrCat(absent, "; ", Ranks(waiting), waiting.size() == 1 ? " waits" : " wait",
                      gone > 0 && gone == ended_earlier ? kEndedEarlier : "", elsewhere);
}

std::string DescribeGone(const std::vector<MemberInfo>& members) {
  constexpr int kNamed = 8;
  std::string text;
  int gone = 0, ended_earlier = 0;
  for (const MemberInfo& member : members) {
    if (member.gone.empty()) continue;
    if (EndedInPeace(member)) ++ended_earlier;
    if (++gone > kNamed) continue;
    absl::StrAppend(&text, text.empty() ? "" : "; ", "rank ", member.rank, " (", member.host,
                    ", pid ", member.pid, "): ", member.gone);
  }
  if (gone > kNamed) absl::StrAppend(&text, "; and ", gone - kNamed, " more");
  return absl::StrCat(text, gone > 0 && gone == ended_earlier ? kEndedEarlier : "");
}

std::string ExplainLostCollective(const LostCollectiveSources& sources, absl::string_view error) {
  const ProgressBoard::Facts mine = sources.board->Read();
  const std::string cause = absl::StrCat(" (", FirstLine(error), ")");
  const bool timed_out = IsCollectiveTimeout(error);
  if (sources.coordinator == nullptr) {
    if (sources.store != nullptr) return AskStore(sources, mine, timed_out) + cause;
    return DidNotFinish(mine, sources, timed_out) + cause;
  }
  if (!timed_out) {
    // A rank that lost a connection gets here before the coordinator learns of the exit of the peer
    // that closed it; a barrier ends as soon as one of its ranks is known to be gone. Ranks are not
    // blamed for not coming to the barrier of this name, because one that has timed out does not
    // come. For a part of the job, only that part takes part, because the others may be well.
    std::string name(kAfterLostCollective);
    BarrierCall call{.same_line = false};
    const std::optional<Seat> seat = sources.coordinator->seat();
    if (seat.has_value() && sources.ranks.size() < static_cast<size_t>(seat->world_size)) {
      absl::StrAppend(&name, " of ", Ranks(sources.ranks));
      call.participants = sources.ranks;
    }
    sources.coordinator->Barrier(name, sources.grace, call).status().IgnoreError();
  }
  const absl::StatusOr<std::vector<MemberInfo>> members = sources.coordinator->Members();
  if (!members.ok()) {
    return absl::StrCat(DidNotFinish(mine, sources, timed_out),
                        ", and the coordinator cannot say why: ", members.status().message(),
                        cause);
  }
  return DescribeLostCollective(mine, sources, *members, timed_out) + cause;
}

}  // namespace muster
