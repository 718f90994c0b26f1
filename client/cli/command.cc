#include "client/cli/command.h"

#include <algorithm>
#include <cerrno>
#include <nlohmann/json.hpp>

#include "absl/strings/cord.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/string_view.h"
#include "base/exit_code.h"
#include "base/suggest.h"
#include "base/text.h"
#include "proto/muster/v1/error.pb.h"
#include "rpc/status.h"

namespace muster::client {
namespace {

constexpr size_t kLongestMessage = 64 << 10;

}  // namespace

bool IsDiskFull(const absl::Status& status) {
  // By the system's message, with which every error of a file ends.
  const auto says = [&](int error) {
    return absl::StrContains(status.message(), absl::ErrnoToStatus(error, "").message());
  };
  // The same message means that a user has too many watches (epoll, inotify).
  for (const char* const watch : {"epoll_ctl: ", "cannot watch "}) {
    if (absl::StrContains(status.message(), watch)) return false;
  }
  return absl::IsResourceExhausted(status) && (says(ENOSPC) || says(EDQUOT));
}

std::string Variable(const std::map<std::string, std::string>& variables, const std::string& name) {
  const auto it = variables.find(name);
  return it == variables.end() ? "" : it->second;
}

int Begin(const CommandSpec& spec, const std::vector<std::string>& args,
          const CommandContext& context, CommandLine* line) {
  if (context.describe != nullptr) {
    context.describe(spec);
    return kExitOk;
  }
  if (const absl::Status status = ParseCommandLine(spec, args, line); !status.ok()) {
    return Fail(spec, context, status, kExitUsage);
  }
  if (!line->help) return -1;
  context.out << HelpText(spec);
  return kExitOk;
}

int Fail(const CommandSpec& spec, const CommandContext& context, const absl::Status& status,
         int code) {
  // The message may contain names of files and tensors that others made.
  context.err << spec.name << ": "
              << Printable(absl::StrReplaceAll(status.message(), {{"\n", " "}}), kLongestMessage)
              << "\n";
  // A full disk is not a bug, and starting again does not help.
  return code == kExitInternal && IsDiskFull(status) ? kExitLimit : code;
}

int FailCall(const CommandSpec& spec, const CommandContext& context, const absl::Status& status) {
  int code = ExitCodeOf(status);
  switch (rpc::GetReason(status)) {
    case v1::ERROR_REASON_JOB_STATE:
    case v1::ERROR_REASON_JOB_RUNS:
    case v1::ERROR_REASON_JOB_ENDED:
    case v1::ERROR_REASON_KEY_REUSED:
    case v1::ERROR_REASON_CHECKPOINT_CONFLICT:
      code = kExitConflict;
      break;
    case v1::ERROR_REASON_LIMIT:
      // Otherwise the request itself is too large.
      if (absl::IsResourceExhausted(status)) code = kExitLimit;
      break;
    default:
      break;
  }
  return Fail(spec, context, status, code);
}

absl::Status SuggestName(const absl::Status& status, const std::string& name,
                         const std::vector<std::string>& names) {
  if (std::find(names.begin(), names.end(), name) != names.end()) return status;
  absl::Status suggests(status.code(), absl::StrCat(status.message(), DidYouMean(name, names)));
  status.ForEachPayload(
      [&](absl::string_view url, const absl::Cord& payload) { suggests.SetPayload(url, payload); });
  return suggests;
}

std::string Dump(const nlohmann::ordered_json& value) {
  return value.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

}  // namespace muster::client
