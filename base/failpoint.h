#ifndef MUSTER_BASE_FAILPOINT_H_
#define MUSTER_BASE_FAILPOINT_H_

#include <atomic>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace muster {

// Named places at which a test makes this process fail. They are in the product as it ships, cost
// one relaxed load of a global while nothing is armed, and do nothing unless the environment says
// so; docs/failpoints.md has the syntax and the table.
//
//   MUSTER_FAILPOINT("engine.before_reply");              in a function of any kind
//   MUSTER_FAILPOINT_STATUS("journal.before_fsync");      where a Status or StatusOr is returned:
//                                                         the only kind that takes action `error`
//
// A name is a string literal, is listed in the table of failpoint.cc, and is used in one place of
// the code (tests/chaos checks both).

struct FailpointInfo {
  const char* name;
  bool fails;  // takes action `error`
  const char* place;
};

// Arms what $MUSTER_FAILPOINTS names; with the variable unset or empty nothing is armed. Call it
// once at the start of a program, before its threads. A library whose program does not call it may
// do so from several threads; calls after the first have no effect and return its result. Errors:
// INVALID_ARGUMENT naming the part of the variable that is wrong.
absl::Status ArmFailpointsFromEnvironment();

// Does the same from given texts, replacing what was armed before. For tests.
//   spec         "name=action[@N]", more of them after commas; see docs/failpoints.md
//   once_path    empty, or a file: the first process that fires creates it; none fires if it exists
//   report_path  where action `report` writes
absl::Status ArmFailpoints(absl::string_view spec, const std::string& once_path,
                           const std::string& report_path);

// One line for each failpoint: its name, whether it takes `error`, and where it is.
std::string ListFailpoints();

// Returns nullptr if there is no failpoint of this name.
const FailpointInfo* FindFailpoint(absl::string_view name);

namespace failpoint_internal {
extern std::atomic<bool> g_armed;
absl::Status Hit(const char* name);
}  // namespace failpoint_internal

}  // namespace muster

#define MUSTER_FAILPOINT(name)                                                   \
  do {                                                                           \
    if (::muster::failpoint_internal::g_armed.load(std::memory_order_relaxed)) { \
      (void)::muster::failpoint_internal::Hit(name);                             \
    }                                                                            \
  } while (false)

#define MUSTER_FAILPOINT_STATUS(name)                                                \
  do {                                                                               \
    if (::muster::failpoint_internal::g_armed.load(std::memory_order_relaxed)) {     \
      if (::absl::Status failpoint_status = ::muster::failpoint_internal::Hit(name); \
          !failpoint_status.ok()) {                                                  \
        return failpoint_status;                                                     \
      }                                                                              \
    }                                                                                \
  } while (false)

#endif  // MUSTER_BASE_FAILPOINT_H_
