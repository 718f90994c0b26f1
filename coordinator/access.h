#ifndef MUSTER_COORDINATOR_ACCESS_H_
#define MUSTER_COORDINATOR_ACCESS_H_

#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "proto/muster/v1/error.pb.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::coordinator {

// What a caller may do. Each role is a row of the table in docs/security.md.
enum class Role {
  kView,     // reads
  kSubmit,   // and submits jobs, and acts on those that are its own
  kNode,     // runs submitted jobs: a node agent
  kAttempt,  // is one attempt of a submitted job, and nothing else
  kAdmin,    // everything
};

// "view", "submit", "node", "attempt", "admin".
absl::string_view RoleName(Role role);
// Of those that a users file may give: not "attempt".
std::optional<Role> ParseRole(absl::string_view name);

// Who calls, as the transport has established it.
struct Identity {
  std::string name = {};  // a user's, also the owner of jobs; empty: the coordinator has no names
  Role role = Role::kAdmin;
  std::string group = {};  // of kAttempt: the only rendezvous job it may touch
};

// Whether the token of an attempt opens this rendezvous job: its own, and that of its agents.
bool Covers(const Identity& attempt, absl::string_view job);

// "control_job"; empty: of no kind.
absl::string_view NameOf(const v1::Op& op);

// The rendezvous job that an operation is about; for those of submitted jobs their job_id; empty:
// none.
absl::string_view JobOf(const v1::Op& op);

// Drops the worker that an operation's fence names, and what it has seen. The incarnation becomes
// one that only `person` has, by which repeated requests are recognised.
void ForgetWorker(absl::string_view person, v1::Op* op);

// Whether `who` may do this. `owner_of`: who submitted the job of that id, or the one that this
// rendezvous job is an attempt of; empty: unknown. Errors: PERMISSION_DENIED / SCOPE that
// names caller, role and what is needed.
std::optional<v1::OpError> CheckAccess(
    const Identity& who, const v1::Op& op,
    absl::FunctionRef<std::string(absl::string_view job)> owner_of);

// Likewise for what is no operation: `what` is "watch job x"; `needs`: kView, kAttempt or kAdmin;
// `job` the one that an attempt must be.
std::optional<v1::OpError> CheckAccess(const Identity& who, Role needs, absl::string_view job,
                                       absl::string_view what);

// Whether an operation belongs in the audit log: people's acts, not the traffic of workers and
// nodes.
bool IsAudited(const v1::Op& op);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_ACCESS_H_
