#ifndef MUSTER_COORDINATOR_JOBS_JOB_SPEC_H_
#define MUSTER_COORDINATOR_JOBS_JOB_SPEC_H_

#include <cstdint>
#include <optional>

#include "proto/muster/v1/error.pb.h"
#include "proto/muster/v1/job.pb.h"

namespace muster::coordinator {

// Returns LIMIT if the specification, as its caller wrote it, has more bytes than allowed.
std::optional<v1::OpError> CheckSpecSize(const v1::JobSpec& spec);

// Sets all fields that have defaults: the other bound of the number of processes, one CPU, the
// delays, digests of files; sorts variables and labels by name. So two spellings of one
// specification become equal, even if CompleteJobSpec refuses it.
void FillJobSpec(v1::JobSpec* spec);

// Returns the hash of a specification that FillJobSpec has filled. Must never change, because the
// journal stores it.
uint64_t HashJobSpec(const v1::JobSpec& spec);

// Performs the other checks of a specification that FillJobSpec has filled. Errors, each naming the
// field and what to write: BAD_FIELD, LIMIT.
std::optional<v1::OpError> CheckFilledJobSpec(const v1::JobSpec& spec);

// Calls CheckSpecSize, FillJobSpec and CheckFilledJobSpec.
std::optional<v1::OpError> CompleteJobSpec(v1::JobSpec* spec);

// Checks and completes only the number of processes, for a job that is resized.
std::optional<v1::OpError> CompleteProcesses(v1::JobSpec* spec);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOBS_JOB_SPEC_H_
