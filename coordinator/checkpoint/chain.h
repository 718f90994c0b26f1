#ifndef MUSTER_COORDINATOR_CHECKPOINT_CHAIN_H_
#define MUSTER_COORDINATOR_CHECKPOINT_CHAIN_H_

#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "proto/muster/v1/checkpoint.pb.h"

namespace muster::coordinator {

// The hash chain over the checkpoints of a job. docs/checkpoint_format.md has the bytes, which
// depend on no serialiser, so that any language can check them. Pure.

// Returns the digest over one line for each file, "NAME\tBYTES\tXXH3\n", sorted by name. `files`
// must be sorted so.
std::string FilesSha256(const std::vector<v1::ShardFile>& files);

// Returns what `record.sha256` must be: the digest over its facts and record.previous_sha256.
std::string RecordSha256(absl::string_view job_id, const v1::CheckpointRecord& record);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_CHECKPOINT_CHAIN_H_
