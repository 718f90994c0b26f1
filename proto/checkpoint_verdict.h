#ifndef MUSTER_PROTO_CHECKPOINT_VERDICT_H_
#define MUSTER_PROTO_CHECKPOINT_VERDICT_H_

#include <cstdint>

#include "absl/strings/escaping.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/text.h"
#include "proto/muster/v1/checkpoint.pb.h"

namespace muster {

// Returns the request that reports what a reader has just found in the files of checkpoint `id`,
// whose record has the hash `sha256` (hexadecimal digits). Empty `damage`: nothing is wrong.
// `contents`: all bytes were read, not only the sizes. The fence is not set.
inline v1::VerifyCheckpointRequest MakeVerdict(uint64_t id, absl::string_view sha256, bool contents,
                                               absl::string_view damage) {
  // The coordinator takes at most 1 KiB, and each byte may become four.
  constexpr size_t kMaxDamage = 250;
  v1::VerifyCheckpointRequest request;
  request.set_checkpoint_id(id);
  request.set_depth(contents ? v1::VERIFY_CONTENTS : v1::VERIFY_SIZES);
  request.set_sha256(absl::HexStringToBytes(sha256));
  request.set_damage(Printable(damage, kMaxDamage));
  request.set_verified_unix_us(static_cast<uint64_t>(absl::ToUnixMicros(absl::Now())));
  return request;
}

}  // namespace muster

#endif  // MUSTER_PROTO_CHECKPOINT_VERDICT_H_
