#ifndef MUSTER_COORDINATOR_ACCESS_H_
#define MUSTER_COORDINATOR_ACCESS_H_

#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/strings/string_view.h"
#include "proto/muster/v1/error.pb.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::coordinator {

// The rights of a caller. Each role is a row of the table in docs/security.md.
enum class Role {
  kView,     // reads
  kSubmit,   // like kView; also submits jobs, and acts on its own
  kNode,     // runs submitted jobs: a node agent
  kAttempt,  // is one attempt of a submitted job, and nothing else
  kAdmin,    // everything
};

// "view", "submit", "node", "attempt", "admin".
absl::string_view RoleName(Role role);
// Parses a role that a users file may give: any but "attempt".
std::optional<Role> ParseRole(absl::string_view name);

// The caller, as the transport has established it.
struct Identity {
  std::string name = {};  // a user's, also the owner of jobs; empty: callers have no names
  Role role = Role::kAdmin;
  std::string group = {};  // for kAttempt: the only rendezvous job it may touch
};

// Returns whether the token of an attempt opens this rendezvous job: its own, or that of its
// agents.
bool Covers(const Identity& attempt, absl::string_view job);

// Returns the name of an operation, such as "control_job"; empty: it has no kind.
absl::string_view NameOf(const v1::Op& op);

// Returns the rendezvous job that an operation is about, or the job_id if it is about a submitted
// job; empty: none.
absl::string_view JobOf(const v1::Op& op);

// Drops the worker that an operation's fence names, and what that worker has seen. The incarnation
// becomes one that only `person` has, by which repeated requests are recognised.
void ForgetWorker(absl::string_view person, v1::Op* op);

// Checks whether `who` may do this. `owner_of` returns who submitted the job of that id, or the job
// that this rendezvous job is an attempt of; empty: unknown. Errors: PERMISSION_DENIED / SCOPE that
// names caller, role and what is needed.
std::optional<v1::OpError> CheckAccess(
    const Identity& who, const v1::Op& op,
    absl::FunctionRef<std::string(absl::string_view job)> owner_of);

// The same for a call that is no operation: `what` is "watch job x"; `needs` is kView, kAttempt or
// kAdmin; `job` is the one that an attempt must be.
std::optional<v1::OpError> CheckAccess(const Identity& who, Role needs, absl::string_view job,
                                       absl::string_view what);

// Returns whether an operation belongs in the audit log, which has people's acts, not the traffic
// of workers and nodes.
bool IsAudited(const v1::Op& op);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_ACCESS_H_
