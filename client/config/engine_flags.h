#ifndef MUSTER_CLIENT_CONFIG_ENGINE_FLAGS_H_
#define MUSTER_CLIENT_CONFIG_ENGINE_FLAGS_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "client/config/launch_config.h"

namespace muster::client {

// Turns the flags of `accelerate launch` for FSDP and DeepSpeed among `given`, all flags of a
// command line by name, into the variables that its processes get: those of `layers[0]`, the layer
// of flags. Both Muster's own programs and Accelerate's read their sharding from these variables.
//
// Errors: INVALID_ARGUMENT, one line that names the flag and the way out: a flag without its
// --use_fsdp or --use_deepspeed, flags of both, --sharding in addition, a config file that already
// has such settings or a section of that engine, and what `accelerate launch` refuses. Pure.
absl::Status ApplyEngineFlags(const std::map<std::string, std::string>& given,
                              std::vector<Layer>* layers);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CONFIG_ENGINE_FLAGS_H_
