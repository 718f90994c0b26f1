#include "worker/checkpoint/foreign_state.h"

#include <sys/stat.h>

#include <algorithm>
#include <cstdint>
#include <iterator>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/file.h"
#include "base/text.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/weight_files.h"

namespace muster {
namespace {

// Whether `name` is "STEM.EXT" or "STEM_N.EXT".
bool IsNumbered(absl::string_view name, absl::string_view stem, absl::string_view extension) {
  if (!absl::ConsumePrefix(&name, stem) || !absl::ConsumeSuffix(&name, extension)) return false;
  return name.empty() || (absl::ConsumePrefix(&name, "_") && IsDigits(name));
}

bool IsOfAccelerate(absl::string_view name) {
  struct Kind {
    absl::string_view stem, extension;
  };
  // Not pytorch_model.bin, which is also a model alone.
  constexpr Kind kKinds[] = {
      {"optimizer", ".bin"},          {"scheduler", ".bin"},      {"sampler", ".bin"},
      {"dl_state_dict", ".bin"},      {"scaler", ".pt"},          {"random_states", ".pkl"},
      {"custom_checkpoint", ".pkl"},  {"pytorch_model_fsdp", ""},  // a folder
      {"pytorch_model_fsdp", ".bin"},
  };
  return std::any_of(std::begin(kKinds), std::end(kKinds),
                     [&](const Kind& kind) { return IsNumbered(name, kind.stem, kind.extension); });
}

// How a program gets the weights of the state in `dir`.
std::string WayToItsWeights(const std::string& dir) {
  for (const char* const shards : {"pytorch_model_fsdp_0", "pytorch_model_fsdp"}) {
    const std::string path = JoinPath(dir, shards);
    if (!PathExists(path)) continue;
    return absl::StrCat("merge its weights with `accelerate merge-weights ", path,
                        " OUT` in Python, and take them with accelerator.load_weights(\"OUT\")");
  }
  const std::string script = JoinPath(dir, "zero_to_fp32.py");  // DeepSpeed's
  if (PathExists(script)) {
    return absl::StrCat("merge its weights with `python ", script, " ", dir,
                        " OUT`, and take them with accelerator.load_weights(\"OUT\")");
  }
  const std::string whole = JoinPath(dir, "pytorch_model_fsdp.bin");
  const std::string from = PathExists(whole) ? whole : dir;
  if (absl::IsNotFound(WeightFiles::Open(from).status())) {
    return "it has no file of weights that is read here: save them with accelerator.save_model() "
           "in Python";
  }
  return absl::StrCat("accelerator.load_weights(\"", from, "\") takes its weights");
}

absl::Status IsNoCheckpoint(const std::string& dir, const std::string& file) {
  return absl::FailedPreconditionError(absl::StrCat(
      dir, " is a state of Accelerate's (", file,
      "), of which Muster resumes neither optimizers nor anything else but the weights: ",
      WayToItsWeights(dir), "; to begin anew, name another folder"));
}

}  // namespace

std::string FileOfAccelerate(const std::string& dir) {
  for (const std::string& name : ListDirectory(dir).value_or(std::vector<std::string>())) {
    if (IsOfAccelerate(name)) return name;
  }
  return "";
}

absl::Status CheckNoStateOfAccelerate(const std::string& dir, const CheckpointFolder& folder) {
  if (!dir.empty()) {
    if (PathExists(JoinPath(dir, kManifestName))) return absl::OkStatus();
    const std::string file = FileOfAccelerate(dir);
    return file.empty() ? absl::OkStatus() : IsNoCheckpoint(dir, file);
  }
  std::string newest, file;
  for (const int64_t number : folder.Numbers().value_or(std::vector<int64_t>())) {
    const std::string path = folder.PathOf(number);
    if (PathExists(JoinPath(path, kManifestName))) return absl::OkStatus();
    if (std::string name = FileOfAccelerate(path); !name.empty()) {
      newest = path;
      file = std::move(name);
    }
  }
  return newest.empty() ? absl::OkStatus() : IsNoCheckpoint(newest, file);
}

bool IsOccupied(const std::string& dir) {
  struct stat info;
  if (stat(dir.c_str(), &info) != 0) return false;
  if (!S_ISDIR(info.st_mode)) return true;
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(dir);
  return names.ok() && !names->empty();
}

}  // namespace muster
