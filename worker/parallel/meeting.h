#ifndef MUSTER_WORKER_PARALLEL_MEETING_H_
#define MUSTER_WORKER_PARALLEL_MEETING_H_

#include <exception>
#include <string>
#include <utility>
#include <vector>

#include "c10/util/Exception.h"
#include "worker/collective/comm.h"

namespace muster {

// Ranks that should meet have come to different places: all of them throw it. `messages`: those of
// all ranks, in rank order; empty where some rank is in an exchange of the program.
class RanksApart : public c10::Error {
 public:
  RanksApart(c10::SourceLocation where, std::string what, std::vector<std::string> messages)
      : c10::Error(where, std::move(what)), messages(std::move(messages)) {}
  std::vector<std::string> messages;
};

// Whether it comes from an exchange that has failed on all of its ranks, since they have come to it
// from different places.
bool IsOfRanksApart(const std::exception_ptr& thrown);

// (collective) The messages of all ranks of `comm`, in rank order. Each rank says with its message
// at which place of the program it is: if ranks that should meet have come to different places, all
// of them throw RanksApart and name two. `place` continues "one rank is at", and has no line break.
// `failure`: what this rank has failed with before, which may be why: it is in those errors; empty:
// nothing.
std::vector<std::string> MeetAt(Comm& comm, const std::string& place,
                                const std::string& message = "", const std::string& failure = "");

// (collective) The same of all ranks of a model, `world`, of which those of `parts` share its parts
// and have exchanges of their own: a rank in one of these would wait for one that is here, and this
// one for it, so these meet first.
std::vector<std::string> MeetAll(Comm& world, Comm& parts, const std::string& place,
                                 const std::string& message, const std::string& failure = "");

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_MEETING_H_
