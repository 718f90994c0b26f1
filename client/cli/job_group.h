#ifndef MUSTER_CLIENT_CLI_JOB_GROUP_H_
#define MUSTER_CLIENT_CLI_JOB_GROUP_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/cli/connection.h"
#include "proto/muster/v1/admin.pb.h"
#include "proto/muster/v1/barrier.pb.h"
#include "proto/muster/v1/membership.pb.h"

namespace muster::client {

// The prefix of a launch's name that could also be the name of a submitted job.
inline constexpr absl::string_view kLaunchPrefix = "launch:";

// Returns the group of workers that the name of a job means: for a submitted job that of its last
// attempt, for a launch its own; "launch:NAME" is always a launch. Blocks for two calls. Errors:
// FAILED_PRECONDITION a submitted job that has not started; INVALID_ARGUMENT a name that both have.
absl::StatusOr<std::string> GroupOf(const Connection& connection, const std::string& job);

// Returns `status`; if it is NOT_FOUND and there is no such job, with the name of a submitted job
// or a launch that is similar to `job`. In that case blocks for two calls.
absl::Status SuggestJob(const Connection& connection, const std::string& job, absl::Status status);

// Removes the groups of agents (kAgentsSuffix) from `reply`, because they are not jobs of a user,
// unless nothing is known about the workers that these agents run.
void RemoveAgentGroups(v1::StatusReply* reply);

// Reads the workers of `group`, page by page. ERROR_REASON_LIMIT: too many for one message of an
// older coordinator, which knows no pages.
absl::Status ListMembers(const Connection& connection, const std::string& group,
                         v1::GetMembersReply* members);

// Reads how late the ranks of `group` come to its barriers. `report` stays empty if they are too
// many for one message.
absl::Status ReadStragglers(const Connection& connection, const std::string& group,
                            v1::StragglerReportReply* report);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_JOB_GROUP_H_
