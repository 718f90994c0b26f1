#ifndef MUSTER_CLIENT_CONFIG_ACCELERATE_FLAGS_H_
#define MUSTER_CLIENT_CONFIG_ACCELERATE_FLAGS_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/config/launch_config.h"

namespace muster::client {

// A flag of `accelerate launch` that is neither a setting of a launch, nor one of FSDP and
// DeepSpeed (engine_flags.h), nor one of torchrun's (torchrun_flags.h).
struct AccelerateOnlyFlag {
  std::string name = {};        // without "--", words joined by "_"
  std::string value_name = {};  // empty: it takes no value
  std::string letter = {};      // the short form without "-", such as "q"
  std::string help = {};        // empty if the flag is refused
  std::string refusal = {};     // what to write instead; empty: the flag is taken
};
const std::vector<AccelerateOnlyFlag>& AccelerateOnlyFlags();

// Applies or refuses those of these flags that are in `given`, which has all flags of a command
// line by name. `layers[0]` is the layer of flags; the others follow by precedence. Errors:
// INVALID_ARGUMENT, one line that names the flag and what to do. Pure.
absl::Status ApplyAccelerateOnlyFlags(const std::map<std::string, std::string>& given,
                                      const MachineFacts& machine, std::vector<Layer>* layers);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CONFIG_ACCELERATE_FLAGS_H_
