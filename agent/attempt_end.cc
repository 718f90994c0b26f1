#include "agent/attempt_end.h"

#include <google/protobuf/util/json_util.h>
#include <sys/stat.h>

#include <optional>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "agent/end_class.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "base/text.h"

namespace muster::agent {
namespace {

constexpr int64_t kMaxReportBytes = 1 << 20;
constexpr size_t kMaxText = 1024;  // the most bytes of a line

v1::EndClass ClassOfRefusal(const absl::Status& status, int num_nodes) {
  switch (status.code()) {
    case absl::StatusCode::kDeadlineExceeded:  // other nodes did not come
      return num_nodes > 1 ? v1::END_CLASS_PEER_FAILED : v1::END_CLASS_NODE_FAILED;
    default:
      return v1::END_CLASS_NODE_FAILED;
  }
}

}  // namespace

v1::AttemptEnd DescribeEnd(const JobResult& result, const std::vector<int>& user_error_codes,
                           bool out_of_memory, int num_nodes, const HangReport* hang) {
  const std::optional<WorkerEnd>& here = result.failed_here;
  const bool first = here.has_value() && here->ToString() == result.failure.why;
  const bool user_error = here.has_value() && IsUserError(*here, user_error_codes);
  v1::AttemptEnd end;
  end.set_rank(-1);
  switch (result.outcome) {
    case JobResult::Outcome::kSucceeded:
      end.set_end_class(v1::END_CLASS_SUCCEEDED);
      return end;
    case JobResult::Outcome::kStopped:
      // Another node may have reported the failure of this one (an echo) before the attempt was
      // over here.
      if (first || user_error) break;
      end.set_end_class(v1::END_CLASS_CANCELLED);
      end.set_why("its runner was asked to stop");
      return end;
    case JobResult::Outcome::kRefused:
      end.set_end_class(ClassOfRefusal(result.status, num_nodes));
      end.set_why(Printable(result.status.message(), kMaxText));
      return end;
    case JobResult::Outcome::kFailed:
      break;
  }
  // No retry helps after a user error, even if another failure came first.
  const bool own = user_error && !first;
  end.set_why(Printable(own ? here->ToString() : result.failure.why, kMaxText));
  for (const std::string& line : own ? here->last_lines : result.failure.last_lines) {
    end.add_last_lines(Printable(line, kMaxText));
  }
  if (here.has_value() && here->exit.at != absl::InfinitePast()) {
    end.set_failed_unix_ms(absl::ToUnixMillis(here->exit.at));
  }
  if (!first && !user_error) {
    end.set_end_class(num_nodes > 1 ? v1::END_CLASS_PEER_FAILED : v1::END_CLASS_PROCESS_FAILED);
    return end;
  }
  if (hang != nullptr && here->killed_because == hang->hang.why) {
    // The worker that was killed because of the hang is not its cause, and its last lines do not
    // show it.
    end.set_end_class(v1::END_CLASS_HANG);
    end.set_why(Printable(hang->hang.why, kMaxText));
    end.set_rank(hang->hang.rank);
    if (here->rank != hang->hang.rank) end.clear_last_lines();
    for (const v1::HungRanks& ranks : hang->ranks) *end.add_hung() = ranks;
    return end;
  }
  end.set_rank(here->rank);
  end.set_exit_code(here->exit.exit_code);
  end.set_signal(here->exit.signal);
  end.set_end_class(ClassOf(*here, user_error_codes, out_of_memory));
  if (end.end_class() == v1::END_CLASS_OUT_OF_MEMORY && here->memory_kill.empty()) {
    end.set_why(absl::StrCat(end.why(), "; the kernel has killed a process for memory"));
  }
  return end;
}

absl::StatusOr<std::string> ReadAttemptFile(const std::string& path, int64_t max_bytes) {
  absl::StatusOr<std::string> text = ReadFile(path, max_bytes);
  // RESOURCE_EXHAUSTED also stands for a temporary lack of memory or descriptors, so the size
  // decides.
  struct stat info;
  if (absl::IsResourceExhausted(text.status()) && stat(path.c_str(), &info) == 0 &&
      info.st_size > max_bytes) {
    return absl::DataLossError(text.status().message());
  }
  return text;
}

absl::Status WriteEnd(const std::string& path, const v1::AttemptEnd& end) {
  std::string text;
  if (!google::protobuf::util::MessageToJsonString(end, &text).ok()) {
    return absl::InternalError("the end of an attempt cannot be written as JSON");
  }
  return WriteFileAtomically(path, text + "\n");
}

absl::StatusOr<v1::AttemptEnd> ReadEnd(const std::string& path) {
  MUSTER_ASSIGN_OR_RETURN(const std::string text, ReadAttemptFile(path, kMaxReportBytes));
  v1::AttemptEnd end;
  if (!google::protobuf::util::JsonStringToMessage(text, &end).ok() ||
      end.end_class() == v1::END_CLASS_UNSPECIFIED) {
    return absl::DataLossError(absl::StrCat(path, " is not the report of a runner"));
  }
  return end;
}

}  // namespace muster::agent
