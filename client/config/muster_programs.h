#ifndef MUSTER_CLIENT_CONFIG_MUSTER_PROGRAMS_H_
#define MUSTER_CLIENT_CONFIG_MUSTER_PROGRAMS_H_

#include <string>
#include <vector>

#include "client/config/launch_config.h"

namespace muster::client {

// What programs that are written with Muster make of the variables that a launch hands on for
// Accelerate's engines, a line each: what they refuse, and why; and what has no effect on them.
// Python programs take all of it. Reads the file that deepspeed_config_file names.
struct MusterProgramNotes {
  std::vector<std::string> refused;
  std::vector<std::string> no_effect;
};
MusterProgramNotes NotesForMusterPrograms(const LaunchConfig& config);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CONFIG_MUSTER_PROGRAMS_H_
