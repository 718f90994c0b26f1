#ifndef MUSTER_WORKER_PARALLEL_MEETING_H_
#define MUSTER_WORKER_PARALLEL_MEETING_H_

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "c10/util/Exception.h"
#include "worker/collective/comm.h"

namespace muster {

// The error that all ranks throw if ranks that should meet have come to different places.
// `messages`: those of all ranks, in rank order; empty if some rank is in an exchange of the
// program.
class RanksApart : public c10::Error {
 public:
  RanksApart(c10::SourceLocation where, std::string what, std::vector<std::string> messages)
      : c10::Error(where, std::move(what)), messages(std::move(messages)) {}
  std::vector<std::string> messages;
};

// Whether the error comes from an exchange that has failed on all of its ranks because they were at
// different places.
bool IsOfRanksApart(const std::exception_ptr& thrown);

// (collective) Returns the messages of all ranks of `comm`, in rank order. With its message each
// rank sends its place in the program: if ranks that should meet have come to different places, all
// of them throw RanksApart, which names two places. `place` continues "one rank is at", and has no
// line break. `failure`: an earlier failure of this rank that may be the cause, for those errors;
// empty: none.
std::vector<std::string> MeetAt(Comm& comm, const std::string& place,
                                const std::string& message = "", const std::string& failure = "");

// (collective) As MeetAt(), among all ranks of a model, `world`. The ranks of `parts` share its
// parts and have exchanges of their own: a rank in one of these would wait for a rank that is here,
// and vice versa, so the ranks of `parts` meet first.
std::vector<std::string> MeetAll(Comm& world, Comm& parts, const std::string& place,
                                 const std::string& message, const std::string& failure = "");

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_MEETING_H_
