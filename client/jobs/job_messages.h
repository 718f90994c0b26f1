#ifndef MUSTER_CLIENT_JOBS_JOB_MESSAGES_H_
#define MUSTER_CLIENT_JOBS_JOB_MESSAGES_H_

#include "client/jobs/job_types.h"
#include "proto/muster/v1/job.pb.h"
#include "proto/muster/v1/node.pb.h"

namespace muster::client {

// Converts the client library's structs to messages, and back. Pure. Enum numbers that this version
// does not know become kUnknown or "UNKNOWN".
v1::JobSpec ToProto(const JobSpec& spec);
JobSpec FromProto(const v1::JobSpec& spec);
Job FromProto(const v1::JobRecord& record);
JobPlan FromProto(const v1::JobPlan& plan);
Node FromProto(const v1::NodeRecord& record);
v1::JobState ToProto(JobState state);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_JOBS_JOB_MESSAGES_H_
