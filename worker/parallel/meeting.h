#ifndef MUSTER_WORKER_PARALLEL_MEETING_H_
#define MUSTER_WORKER_PARALLEL_MEETING_H_

#include <string>
#include <vector>

#include "worker/collective/comm.h"

namespace muster {

// (collective) The messages of all ranks of `comm`, in rank order. Each rank says with its message
// at which place of the program it is: if ranks that should meet have come to different places, all
// of them throw and name two. `place` continues "one rank is at", and has no line break. `failure`:
// what this rank has failed with before, which may be why: it is in those errors; empty: nothing.
std::vector<std::string> MeetAt(Comm& comm, const std::string& place,
                                const std::string& message = "", const std::string& failure = "");

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_MEETING_H_
