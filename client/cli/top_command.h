#ifndef MUSTER_CLIENT_CLI_TOP_COMMAND_H_
#define MUSTER_CLIENT_CLI_TOP_COMMAND_H_

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "client/cli/command.h"
#include "proto/muster/v1/admin.pb.h"
#include "proto/muster/v1/barrier.pb.h"
#include "proto/muster/v1/membership.pb.h"

namespace muster::client {

// `muster top [JOB]`: shows jobs, ranks and steps per second, periodically. Returns the exit code.
int RunTopCommand(const std::vector<std::string>& args, const CommandContext& context);

// A coordinator's answers at one moment.
struct TopSample {
  absl::Time at;    // by the monotonic clock, by which rates are measured
  absl::Time wall;  // the time of day
  v1::StatusReply status;
  // The group of the job whose ranks are shown; empty: none.
  std::string group;
  v1::GetMembersReply members;
  v1::StragglerReportReply stragglers;
};

// Returns the lines of one picture, at most `height` (0: any number), each at most `width` bytes
// (0: any). Ranks come slowest first: fewest steps, then the longest without a heartbeat. `before`
// is the sample from which rates are measured; null: there is none yet.
std::vector<std::string> TopLines(const TopSample& now, const TopSample* before, int width,
                                  int height);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_TOP_COMMAND_H_
