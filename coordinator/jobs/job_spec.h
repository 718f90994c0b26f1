#ifndef MUSTER_COORDINATOR_JOBS_JOB_SPEC_H_
#define MUSTER_COORDINATOR_JOBS_JOB_SPEC_H_

#include <cstdint>
#include <optional>

#include "proto/muster/v1/error.pb.h"
#include "proto/muster/v1/job.pb.h"

namespace muster::coordinator {

// LIMIT: more bytes than a specification may have, as its caller has written it.
std::optional<v1::OpError> CheckSpecSize(const v1::JobSpec& spec);

// Fills what is left to its default: the other bound of the number of processes, one CPU, the
// delays, digests of files; sorts variables and labels by name. So two writings of one
// specification are equal, also where CompleteJobSpec refuses it.
void FillJobSpec(v1::JobSpec* spec);

// Of a specification that FillJobSpec has filled; the same for ever, as it is in the journal.
uint64_t HashJobSpec(const v1::JobSpec& spec);

// The other checks of a specification that FillJobSpec has filled. Errors, each naming the field
// and what to write: BAD_FIELD, LIMIT.
std::optional<v1::OpError> CheckFilledJobSpec(const v1::JobSpec& spec);

// All three.
std::optional<v1::OpError> CompleteJobSpec(v1::JobSpec* spec);

// Only the number of processes, for a job that gets another one.
std::optional<v1::OpError> CompleteProcesses(v1::JobSpec* spec);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOBS_JOB_SPEC_H_
