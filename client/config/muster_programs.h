#ifndef MUSTER_CLIENT_CONFIG_MUSTER_PROGRAMS_H_
#define MUSTER_CLIENT_CONFIG_MUSTER_PROGRAMS_H_

#include <string>
#include <vector>

#include "client/config/launch_config.h"

namespace muster::client {

// How programs that are written with Muster treat the variables that a launch passes on for
// Accelerate's engines, a line each: what they refuse, and why; and what has no effect on them.
// Python programs use all of the variables. Reads the file that deepspeed_config_file names.
struct MusterProgramNotes {
  std::vector<std::string> refused;
  std::vector<std::string> no_effect;
};
MusterProgramNotes NotesForMusterPrograms(const LaunchConfig& config);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CONFIG_MUSTER_PROGRAMS_H_
