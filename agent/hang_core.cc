#include "agent/hang_core.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/text.h"
#include "rpc/session/duration.h"

namespace muster::agent {
namespace {

// Workers and agents beat every 2 s: one that was silent for this long reports no progress.
constexpr absl::Duration kNotHeard = absl::Seconds(15);
// The longest delay of a restart (5 min), the default join_timeout, and the same for loading. After
// that, the survivors of a loss that is never repaired, such as that of a stopped process, count as
// hanging.
constexpr absl::Duration kLongestLoss = absl::Minutes(30);
constexpr int kNamed = 4;
constexpr size_t kMaxStack = 16 << 10;

bool IsSlowOnPurpose(absl::string_view phase) {
  return phase == "save_state" || phase == "load_state" || phase == "load_weights";
}

std::vector<const v1::Member*> Alive(const v1::GetMembersReply& members) {
  std::vector<const v1::Member*> alive;
  for (const v1::Member& member : members.members()) {
    if (member.rank() >= 0 && member.state() == v1::WORKER_STATE_RUNNING) alive.push_back(&member);
  }
  return alive;
}

// Whether a rank was lost and the others wait for its successor, or have just been told to: until
// it has come they are alive but cannot show progress. Ranks that have finished are not lost.
bool LacksARank(const v1::GetMembersReply& members) {
  std::set<absl::string_view> seated;
  for (const v1::Member& member : members.members()) {
    if (member.rank() < 0) {
      // Includes ranks that have ended well and start again, for example with another number of
      // machines.
      if (seated.count(member.worker_id()) != 0) return true;
      continue;
    }
    seated.insert(member.worker_id());
    const bool failed = member.state() == v1::WORKER_STATE_LOST ||
                        member.state() == v1::WORKER_STATE_FENCED ||
                        (member.state() == v1::WORKER_STATE_EXITED &&
                         (member.exit().exit_code() != 0 || member.exit().signal() != 0));
    if (failed) return true;
  }
  return false;
}

// Returns everything that changes with their progress. For a program that does not count its signs
// of progress, only what it shows: a step count that restarts lower, or a phase that ended and
// began again between two looks, goes unnoticed.
std::string Shows(const std::vector<const v1::Member*>& alive) {
  std::string shows;
  for (const v1::Member* const member : alive) {
    absl::StrAppend(&shows, member->rank(), " ", member->incarnation(), " ", member->progress(),
                    "\n");
    if (member->progress() != 0) continue;
    absl::StrAppend(&shows, member->last_step(), " ", member->phase(), "\n",
                    member->last_collective(), "\n");
  }
  return shows;
}

// Whether the rank is in a collective, or at a barrier, that others have not reached or left.
bool Waits(const v1::Member& member) {
  return member.phase() == "wait_for_everyone" ||
         (!member.last_collective().empty() && !absl::EndsWith(member.last_collective(), ", done"));
}

std::string Name(const v1::Member& member) {
  return absl::StrCat(
      "rank ", member.rank(), " (pid ", member.pid(), " on ", member.host(), ", ",
      DescribeProgress(member.last_step(), member.phase(), member.last_collective()), ")");
}

}  // namespace

std::string DescribeProgress(int64_t step, const std::string& phase,
                             const std::string& collective) {
  return absl::StrCat("step ", step, phase.empty() ? "" : ", ", phase,
                      collective.empty() ? "" : ", ", collective);
}

absl::Duration HangCore::Period(absl::Duration timeout) {
  return std::clamp(timeout / 8, absl::Seconds(1), absl::Seconds(15));
}

bool HangCore::StillHangs(const v1::GetMembersReply& members) {
  if (members.generation() == generation_ && Shows(Alive(members)) == shown_) return true;
  reported_ = false;
  return false;
}

std::optional<Hang> HangCore::Look(const v1::GetMembersReply& members, absl::Time now) {
  if (members.generation() != generation_) {
    generation_ = members.generation();
    reported_ = false;
    shown_.clear();
  }
  const std::vector<const v1::Member*> alive = Alive(members);
  const std::string shows = Shows(alive);
  if (!LacksARank(members)) {
    lacks_since_ = absl::InfiniteFuture();
  } else if (lacks_since_ == absl::InfiniteFuture()) {
    lacks_since_ = now;
  }
  bool counts = lacks_since_ == absl::InfiniteFuture() || now - lacks_since_ > kLongestLoss;
  bool stepped = false;
  for (const v1::Member* const member : alive) {
    stepped = stepped || member->last_step() > 0;
    counts = counts && !IsSlowOnPurpose(member->phase()) &&
             rpc::FromProto(member->heartbeat_age()) < kNotHeard;
  }
  // A gap: this process was stopped, or the machine slept, and the workers with it.
  const bool slept = looked_ != absl::InfinitePast() && now - looked_ > 4 * Period(timeout_);
  looked_ = now;
  if (std::exchange(shown_, shows) != shows || !counts || !stepped || slept ||
      since_ == absl::InfinitePast()) {
    since_ = now;
    return std::nullopt;
  }
  if (reported_ || now - since_ < timeout_) return std::nullopt;
  reported_ = true;
  Hang hang;
  std::vector<const v1::Member*> missed;
  for (const v1::Member* const member : alive) {
    if (!Waits(*member)) missed.push_back(member);
  }
  const bool all = missed.size() == alive.size() || missed.empty();
  if (missed.size() == 1 && !all) hang.rank = missed.front()->rank();
  // If all ranks look alike, the first ones stand for the others.
  if (all) missed = alive;
  hang.why = absl::StrCat("no rank has shown progress for ", absl::FormatDuration(timeout_), ": ");
  for (size_t i = 0; i < missed.size() && i < kNamed; ++i) {
    absl::StrAppend(&hang.why, i == 0 ? "" : ", ", Name(*missed[i]));
  }
  if (missed.size() > kNamed) {
    absl::StrAppend(&hang.why, " and ", missed.size() - kNamed, " more");
  }
  if (!all) {
    const auto waiting = std::find_if(alive.begin(), alive.end(),
                                      [](const v1::Member* member) { return Waits(*member); });
    absl::StrAppend(
        &hang.why, "; ", alive.size() - missed.size(),
        alive.size() - missed.size() == 1 ? " other waits: " : " others wait: ", Name(**waiting));
  }
  return hang;
}

std::vector<v1::HungRanks> GroupHungRanks(const std::vector<v1::RankStack>& stacks,
                                          const v1::GetMembersReply& members, size_t max_bytes) {
  std::map<int, const v1::Member*> by_rank;
  for (const v1::Member& member : members.members()) by_rank[member.rank()] = &member;
  std::vector<v1::HungRanks> groups;
  for (const v1::RankStack& one : stacks) {
    const int rank = one.worker().rank();
    const auto member = by_rank.find(rank);
    const std::string doing =
        member == by_rank.end()
            ? DescribeProgress(one.worker().last_step(), "", one.worker().last_collective())
            : DescribeProgress(member->second->last_step(), member->second->phase(),
                               member->second->last_collective());
    std::string stack = one.missing().empty() ? one.worker().native_stack() : "";
    if (stack.size() > kMaxStack) {
      stack = absl::StrCat(Utf8Prefix(stack, kMaxStack), "\n...");
    }
    const std::string text =
        one.missing().empty() ? doing : absl::StrCat(doing, "; no stack: ", one.missing());
    const auto same = std::find_if(groups.begin(), groups.end(), [&](const v1::HungRanks& group) {
      return group.doing() == text && group.stack() == stack;
    });
    v1::HungRanks& group = same == groups.end() ? groups.emplace_back() : *same;
    group.add_ranks(rank);
    group.set_doing(text);
    group.set_stack(std::move(stack));
  }
  size_t bytes = 0;
  for (size_t i = 0; i < groups.size(); ++i) {
    if (bytes + groups[i].ByteSizeLong() > max_bytes) groups[i].clear_stack();
    bytes += groups[i].ByteSizeLong();
    if (bytes > max_bytes) {
      groups.resize(i);
      break;
    }
  }
  return groups;
}

}  // namespace muster::agent
