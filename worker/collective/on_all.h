#ifndef MUSTER_WORKER_COLLECTIVE_ON_ALL_H_
#define MUSTER_WORKER_COLLECTIVE_ON_ALL_H_

#include <exception>
#include <string>

#include "absl/functional/function_ref.h"
#include "worker/collective/comm.h"

namespace muster {

// Collective. Does `step`, which makes no collectives, on every rank: what one rank alone may fail
// at, before collectives in which the others would wait for it. A rank on which it throws throws
// that; the others throw c10::Error, "rank 1 cannot WHAT: why", of the first such rank.
void OnAll(Comm& comm, const std::string& what, absl::FunctionRef<void()> step);

// What is thrown, in words. Never empty.
std::string TextOf(const std::exception_ptr& thrown);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_ON_ALL_H_
