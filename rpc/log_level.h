#ifndef MUSTER_RPC_LOG_LEVEL_H_
#define MUSTER_RPC_LOG_LEVEL_H_

#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/log.h"
#include "proto/muster/v1/operations.pb.h"

namespace muster::rpc {

// The two enums have the same levels, but the proto's numbers are one higher: its 0 means not
// given.
inline v1::LogLevel ToProto(LogLevel level) {
  return static_cast<v1::LogLevel>(static_cast<int>(level) + 1);
}
// `level` must be given and known.
inline LogLevel FromProto(v1::LogLevel level) {
  return static_cast<LogLevel>(static_cast<int>(level) - 1);
}
static_assert(v1::LOG_LEVEL_DEBUG == static_cast<int>(LogLevel::kDebug) + 1 &&
              v1::LOG_LEVEL_ERROR == static_cast<int>(LogLevel::kError) + 1);

// Returns "warning", say; "level 7" for a level that only a newer program knows.
inline std::string LogLevelName(v1::LogLevel level) {
  if (!v1::LogLevel_IsValid(level)) return absl::StrCat("level ", static_cast<int>(level));
  return absl::AsciiStrToLower(absl::StripPrefix(v1::LogLevel_Name(level), "LOG_LEVEL_"));
}

}  // namespace muster::rpc

#endif  // MUSTER_RPC_LOG_LEVEL_H_
