#include "client/cli/job_group.h"

#include <grpcpp/grpcpp.h>

#include <algorithm>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/defaults.h"
#include "client/cli/command.h"
#include "client/jobs/client_on_channel.h"
#include "client/jobs/follow_log.h"
#include "proto/muster/v1/admin.grpc.pb.h"
#include "proto/muster/v1/barrier.grpc.pb.h"
#include "proto/muster/v1/error.pb.h"
#include "proto/muster/v1/membership.grpc.pb.h"
#include "rpc/channel.h"
#include "rpc/status.h"

namespace muster::client {

void RemoveAgentGroups(v1::StatusReply* reply) {
  absl::flat_hash_set<std::string> of_workers;
  for (const v1::JobStatus& job : reply->jobs()) of_workers.insert(job.job_id());
  auto* const jobs = reply->mutable_jobs();
  jobs->erase(std::remove_if(jobs->begin(), jobs->end(),
                             [&](const v1::JobStatus& job) {
                               absl::string_view workers = job.job_id();
                               return absl::ConsumeSuffix(&workers, kAgentsSuffix) &&
                                      of_workers.contains(workers);
                             }),
              jobs->end());
}

absl::Status SuggestJob(const Connection& connection, const std::string& job, absl::Status status) {
  if (!absl::IsNotFound(status)) return status;
  std::vector<std::string> names;
  const auto jobs = ClientOn(connection.channel, connection.timeout, connection.timeout).list({});
  if (jobs.ok()) {
    for (const Job& known : *jobs) names.push_back(known.id);
  }
  v1::StatusReply launches;
  grpc::ClientContext call;
  rpc::SetTimeout(call, connection.timeout);
  if (v1::Admin::NewStub(connection.channel)->Status(&call, {}, &launches).ok()) {
    RemoveAgentGroups(&launches);
    for (const v1::JobStatus& known : launches.jobs()) {
      // The rest of an attempt whose program has no group.
      if (!absl::EndsWith(known.job_id(), kAgentsSuffix)) names.push_back(known.job_id());
    }
  }
  return SuggestName(status, job, names);
}

absl::StatusOr<std::string> GroupOf(const Connection& connection, const std::string& job) {
  // A launch may have any name, even that of a submitted job.
  if (absl::string_view launch = job; absl::ConsumePrefix(&launch, kLaunchPrefix)) {
    return std::string(launch);
  }
  const absl::StatusOr<Job> submitted =
      ClientOn(connection.channel, connection.timeout, connection.timeout).get(job);
  if (absl::IsNotFound(submitted.status()) || absl::IsUnimplemented(submitted.status())) return job;
  if (!submitted.ok()) return submitted.status();
  v1::GetMembersRequest request;
  request.set_job_id(job);
  v1::GetMembersReply members;
  grpc::ClientContext call;
  rpc::SetTimeout(call, connection.timeout);
  const bool known =
      v1::Membership::NewStub(connection.channel)->GetMembers(&call, request, &members).ok();
  // A group is kept for some time after its end.
  const bool runs =
      known && std::any_of(members.members().begin(), members.members().end(), [](const auto& one) {
        return one.state() == v1::WORKER_STATE_JOINING || one.state() == v1::WORKER_STATE_RUNNING;
      });
  if (runs) {
    return absl::InvalidArgumentError(
        absl::StrCat(job, " is both a submitted job and a launch: write ", kLaunchPrefix, job,
                     " for the launch, or ", job, ".", std::max(1, LastBegun(*submitted)),
                     " for that attempt of the submitted job"));
  }
  if (submitted->attempts == 0) {
    return rpc::ErrorWithReason(absl::StatusCode::kFailedPrecondition,
                                absl::StrCat("job ", job, " has not started yet: ", submitted->why),
                                v1::ERROR_REASON_JOB_STATE);
  }
  return absl::StrCat(job, ".", LastBegun(*submitted));
}

absl::Status ListMembers(const Connection& connection, const std::string& group,
                         v1::GetMembersReply* members) {
  v1::GetMembersRequest request;
  request.set_job_id(group);
  int starts = 0;
  while (true) {
    v1::GetMembersReply page;
    grpc::ClientContext call;
    rpc::SetTimeout(call, connection.timeout);
    const absl::Status status = rpc::FromGrpc(
        v1::Membership::NewStub(connection.channel)->GetMembers(&call, request, &page));
    // Pages of two generations cannot be combined.
    const bool changed =
        request.first() > 0 && (!status.ok() || page.generation() != members->generation());
    if (changed && ++starts < 4) {
      members->Clear();
      request.clear_first();
      continue;
    }
    members->MergeFrom(page);
    request.set_first(page.next());
    if (!status.ok() || request.first() == 0) return status;
  }
}

absl::Status ReadStragglers(const Connection& connection, const std::string& group,
                            v1::StragglerReportReply* report) {
  v1::StragglerReportRequest request;
  request.set_job_id(group);
  grpc::ClientContext call;
  rpc::SetTimeout(call, connection.timeout);
  const absl::Status status = rpc::FromGrpc(
      v1::Barrier::NewStub(connection.channel)->StragglerReport(&call, request, report));
  return rpc::GetReason(status) == v1::ERROR_REASON_LIMIT ? absl::OkStatus() : status;
}

}  // namespace muster::client
