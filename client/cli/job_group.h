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

// Before the name of a launch, which may be that of a submitted job, too.
inline constexpr absl::string_view kLaunchPrefix = "launch:";

// The group of workers that the name of a job means: of a submitted one that of its last attempt,
// of a launch its own; "launch:NAME" is always a launch. Blocks for two calls. Errors:
// FAILED_PRECONDITION a submitted job that has not started; INVALID_ARGUMENT a name that both have.
absl::StatusOr<std::string> GroupOf(const Connection& connection, const std::string& job);

// `status`, with the name of a submitted job or a launch that is like `job` if it is NOT_FOUND and
// there is no such job. Blocks for two calls then.
absl::Status SuggestJob(const Connection& connection, const std::string& job, absl::Status status);

// Removes the groups of agents (kAgentsSuffix) from `reply`, unless nothing is known of the workers
// that these agents run: they are no jobs of anybody's.
void RemoveAgentGroups(v1::StatusReply* reply);

// The workers of `group`, page by page. Too many for one message of an older coordinator, which
// knows no pages: ERROR_REASON_LIMIT.
absl::Status ListMembers(const Connection& connection, const std::string& group,
                         v1::GetMembersReply* members);

// How late the ranks of `group` come to its barriers. Too many for one message: `report` stays
// empty.
absl::Status ReadStragglers(const Connection& connection, const std::string& group,
                            v1::StragglerReportReply* report);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_JOB_GROUP_H_
