#include "client/config/engine_flags.h"

#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/bool_word.h"
#include "base/status_macros.h"
#include "client/config/accelerate_launch.h"

namespace muster::client {
namespace {

constexpr char kFsdp[] = "use_fsdp", kDeepspeed[] = "use_deepspeed";

// Returns the flag that switches on the engine of which `name` is a setting.
const char* EngineOf(const std::string& name) {
  return name == kFsdp || absl::StartsWith(name, "fsdp_") ? kFsdp : kDeepspeed;
}

absl::StatusOr<std::map<std::string, std::string>> VariablesOf(
    const std::vector<std::string>& engine) {
  // Counts and devices are our own settings: here they must only fit.
  std::vector<std::string> args = {"--num_processes", "2",   "--machine_rank",    "0",
                                   "--gpu_ids",       "all", "--main_process_ip", "127.0.0.1"};
  args.insert(args.end(), engine.begin(), engine.end());
  MUSTER_ASSIGN_OR_RETURN(AccelerateLaunch launch,
                          PlanAccelerateLaunch(nullptr, args, {}, {.fp8 = true}));
  launch.env.merge(launch.left_out);
  return std::move(launch.env);
}

// The flags among `given`: their names, and as written.
struct EngineFlags {
  std::vector<std::string> names, args;
};
absl::StatusOr<EngineFlags> FlagsAmong(const std::map<std::string, std::string>& given) {
  EngineFlags flags;
  for (const AccelerateFlag& flag : AccelerateEngineFlags()) {
    const auto found = given.find(flag.name);
    if (found == given.end()) continue;
    if (!flag.takes_value) {
      const std::optional<bool> on = ParseBoolWord(found->second);
      if (!on.has_value()) {
        return absl::InvalidArgumentError(
            absl::StrCat("--", flag.name, "=", found->second, ": write true or false"));
      }
      if (!*on) continue;
    }
    flags.names.push_back(flag.name);
    flags.args.push_back(absl::StrCat("--", flag.name));
    if (flag.takes_value) flags.args.push_back(found->second);
  }
  return flags;
}

// Returns the engine that all flags are about: kFsdp or kDeepspeed.
absl::StatusOr<std::string> OneEngine(const std::vector<std::string>& names) {
  std::string used;
  for (const std::string& name : names) {
    if (name != kFsdp && name != kDeepspeed) continue;
    if (!used.empty()) {
      return absl::InvalidArgumentError(
          "--use_fsdp and --use_deepspeed exclude each other: write one of them");
    }
    used = name;
  }
  for (const std::string& name : names) {
    const std::string engine = EngineOf(name);
    if (used.empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("--", name, " has no effect without --", engine, ": add it"));
    }
    if (engine == used) continue;
    return absl::InvalidArgumentError(absl::StrCat("--", name, " is a setting of --", engine,
                                                   ", and the launch has --", used,
                                                   ": leave one of them out"));
  }
  return used;
}

}  // namespace

absl::Status ApplyEngineFlags(const std::map<std::string, std::string>& given,
                              std::vector<Layer>* layers) {
  MUSTER_ASSIGN_OR_RETURN(const EngineFlags flags, FlagsAmong(given));
  if (flags.names.empty()) return absl::OkStatus();
  MUSTER_ASSIGN_OR_RETURN(const std::string engine, OneEngine(flags.names));
  const std::string source = absl::StrCat("--", engine);
  if (layers->front().settings.count("sharding") > 0) {
    return absl::InvalidArgumentError(
        absl::StrCat(source, " and --sharding both set what is sharded: use only one of them"));
  }
  for (const Layer& layer : *layers) {
    // A program prefers this setting to the engine's.
    const auto sharding = layer.settings.find("sharding");
    if (sharding != layer.settings.end()) {
      return absl::InvalidArgumentError(absl::StrCat(
          source, ": sharding: ", sharding->second.text, " (from ", sharding->second.source,
          ") also sets what is sharded, and would replace it: leave one of them out"));
    }
    for (const char* variable : {"ACCELERATE_USE_FSDP", "ACCELERATE_USE_DEEPSPEED"}) {
      const auto found = layer.env.find(variable);
      if (found == layer.env.end()) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(source, ": ", found->second.source, " has these settings already (",
                       variable, "): change them there, or leave them out there"));
    }
    // Accelerate's launcher uses the section then; here only the flags would count.
    for (const UnusedSection& section : layer.unused_sections) {
      if (section.flag != engine) continue;
      return absl::InvalidArgumentError(
          absl::StrCat(source, ": ", section.place, ": ", section.name,
                       " would be lost: write distributed_type: ", section.type,
                       " there in place of ", source, ", or leave the section out"));
    }
  }
  MUSTER_ASSIGN_OR_RETURN(const auto without, VariablesOf({}));
  MUSTER_ASSIGN_OR_RETURN(const auto with, VariablesOf(flags.args));
  for (const auto& [name, value] : with) {
    const auto found = without.find(name);
    if (found != without.end() && found->second == value) continue;
    layers->front().env[name] = {value, source};
  }
  return absl::OkStatus();
}

}  // namespace muster::client
