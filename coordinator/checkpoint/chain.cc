#include "coordinator/checkpoint/chain.h"

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/signature.h"

namespace muster::coordinator {

std::string FilesSha256(const std::vector<v1::ShardFile>& files) {
  std::string text;
  for (const v1::ShardFile& file : files) {
    absl::StrAppend(&text, file.name(), "\t", file.bytes(), "\t", file.xxh3(), "\n");
  }
  return Sha256(text);
}

std::string RecordSha256(absl::string_view job_id, const v1::CheckpointRecord& record) {
  // Names are escaped, so that no name can look like the line after it.
  return Sha256(absl::StrCat(
      "muster checkpoint 1\njob ", absl::CHexEscape(job_id), "\nid ", record.checkpoint_id(),
      "\npath ", absl::CHexEscape(record.path()), "\niteration ", record.iteration(), "\nstep ",
      record.step(), "\nranks ", record.ranks(), "\nplan ",
      absl::StrCat(absl::Hex(record.plan_digest(), absl::kZeroPad16)), "\ncreated ",
      record.created_unix_us(), "\nfiles ", record.files(), "\nbytes ", record.bytes(),
      "\nfiles_sha256 ", absl::BytesToHexString(record.files_sha256()), "\nprevious ",
      absl::BytesToHexString(record.previous_sha256()), "\n"));
}

}  // namespace muster::coordinator
