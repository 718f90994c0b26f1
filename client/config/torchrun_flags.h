#ifndef MUSTER_CLIENT_CONFIG_TORCHRUN_FLAGS_H_
#define MUSTER_CLIENT_CONFIG_TORCHRUN_FLAGS_H_

#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "client/config/launch_config.h"

namespace muster::client {

// A flag of torchrun (PyTorch 2) that has another name or form than the setting that it becomes, or
// that a launch cannot honour.
struct TorchrunFlag {
  std::string name = {};                  // without "--", words joined by "_"
  std::string value_name = {};            // empty: it takes no value
  std::string help = {};                  // the setting that it becomes; empty if refused
  std::string letter = {};                // "m": "-m" means the same
  std::vector<std::string> choices = {};  // words that it takes, in addition to a number
  std::string refusal = {};  // why it cannot be honoured and what to write instead; empty: it can
  // Flags with the same meaning, torchrun's or Muster's: only one of them may be given.
  std::vector<std::string> rivals = {};
};
const std::vector<TorchrunFlag>& TorchrunFlags();

// Translates the torchrun flags among `given`, all flags of a command line by name, into settings
// of `layers[0]`, the layer of flags. The other layers follow by precedence: the number of machines
// may come from them. Errors: INVALID_ARGUMENT, one line that names the flag and the way out: a
// flag that a launch cannot honour, a bad value, two flags with the same meaning. Pure.
absl::Status ApplyTorchrunFlags(const std::map<std::string, std::string>& given,
                                const MachineFacts& machine, std::vector<Layer>* layers);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CONFIG_TORCHRUN_FLAGS_H_
