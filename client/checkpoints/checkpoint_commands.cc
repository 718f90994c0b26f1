#include "client/checkpoints/checkpoint_commands.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <system_error>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/file_identity.h"
#include "base/json.h"
#include "base/signature.h"
#include "base/size_option.h"
#include "base/status_macros.h"
#include "base/suggest.h"
#include "base/text.h"
#include "base/units.h"
#include "client/checkpoints/seal_marks.h"
#include "client/checkpoints/weight_diff.h"
#include "client/cli/command.h"
#include "client/cli/connection.h"
#include "client/cli/info_commands.h"
#include "worker/checkpoint/digest.h"
#include "worker/checkpoint/divided_files.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/node_part.h"
#include "worker/checkpoint/registrar.h"
#include "worker/checkpoint/run_folder.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/seal.h"
#include "worker/checkpoint/shape_text.h"
#include "worker/checkpoint/staging_folder.h"
#include "worker/checkpoint/unfinished_saves.h"
#include "worker/checkpoint/weight_files.h"
#include "worker/checkpoint/weight_writer.h"

namespace muster::client {
namespace {

using nlohmann::ordered_json;

constexpr int64_t kLargestKeyFile = 16 << 10;

constexpr char kExitCodes[] =
    "Exit codes: 0 done; 1 damaged or not signed (verify) or different (diff); 2 wrong options, or "
    "an "
    "impossible\nrequest, also one that is too large; 3 not found; 4 an input file would be "
    "replaced; 6 the disk has no room; "
    "8 not permitted.";

// Names and messages come from files that others wrote: they must not control the terminal.
std::string Shown(absl::string_view text) { return Printable(text, /*max_bytes=*/8192); }

std::string Plural(uint64_t count, absl::string_view one) {
  return absl::StrCat(count, " ", one, count == 1 ? "" : "s");
}

// A running command: its words, and the destination of its results.
struct Call {
  const CommandSpec& spec;
  const CommandLine& line;
  const CommandContext& context;
  bool json = false;
};

int Fail(const Call& call, const absl::Status& status) {
  // None of these is a bug: DATA_LOSS is the result of the check, UNIMPLEMENTED the format of a
  // newer program, and RESOURCE_EXHAUSTED (except for a full disk) a file or request beyond a
  // limit.
  return Fail(call.spec, call.context, status,
              absl::IsDataLoss(status)                                   ? kExitJobFailed
              : absl::IsUnimplemented(status)                            ? kExitUsage
              : absl::IsResourceExhausted(status) && !IsDiskFull(status) ? kExitUsage
                                                                         : ExitCodeOf(status));
}

// Runs one command; handles the options that all commands have, --help, and mistakes.
template <class F>
int Run(CommandSpec spec, const std::vector<std::string>& args, const CommandContext& context,
        size_t min_words, const F& body) {
  spec.options.push_back(OutputOption({"text", "json"}));
  spec.details = absl::StrCat(spec.details, spec.details.empty() ? "" : "\n", kExitCodes);
  CommandLine line;
  if (const int code = Begin(spec, args, context, &line); code >= 0) return code;
  const auto wrong = [&](const std::string& text) {
    return Fail(spec, context, absl::InvalidArgumentError(text), kExitUsage);
  };
  const std::string format = line.Has("output") ? line.Get("output") : "text";
  if (line.words.size() < min_words) {
    return wrong(absl::StrCat("write ", spec.name, " ", spec.usage));
  }
  return body(Call{spec, line, context, format == "json"});
}

// --- Finding checkpoints ---

bool IsCheckpoint(const std::string& path) { return PathExists(JoinPath(path, kManifestName)); }

// Returns the folder that holds checkpoint_N: `path`, or "checkpoints" in it, where save_state puts
// them.
absl::StatusOr<CheckpointFolder> FindRoot(const std::string& path) {
  if (!PathExists(path)) return absl::NotFoundError(absl::StrCat(path, " does not exist"));
  if (!IsFolder(path)) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is a file, not a folder"));
  }
  for (const std::string& root : {path, JoinPath(path, "checkpoints")}) {
    CheckpointFolder folder(root);
    MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers, folder.Numbers());
    if (!numbers.empty()) return folder;
  }
  return absl::NotFoundError(absl::StrCat(path, " holds no checkpoint_0, checkpoint_1, ..."));
}

struct Checkpoint {
  std::string path;
  absl::StatusOr<Manifest> manifest = absl::UnknownError("not looked at");
  // NOT_FOUND: it was saved without a coordinator.
  absl::StatusOr<RegisteredCheckpoint> seal = absl::NotFoundError("not looked at");
  bool has_pin = false;  // in the folder
  // What the coordinator has registered, if one was asked.
  std::optional<RegisteredState> registered = std::nullopt;
  // For verify: whether the seal is about this checkpoint, and signed.
  absl::Status trust = absl::OkStatus();
  // For a sealed checkpoint whose writer ended before it gave the folder its name: that name.
  std::string lacks = "";
  // For a checkpoint that nodes keep in parts: the files of other nodes. The files here match
  // `manifest`.
  KeptElsewhere elsewhere = {};
  // The identity of the folder that was read; nullopt: it did not exist.
  std::optional<std::string> folder = std::nullopt;
};

// Does the same as VerifyCheckpoint, but files that other nodes keep may be missing.
absl::StatusOr<Manifest> VerifyHere(const std::string& path, VerifyLevel level,
                                    KeptElsewhere* elsewhere) {
  absl::StatusOr<Manifest> whole = VerifyCheckpoint(path, level);
  if (!absl::IsDataLoss(whole.status())) return whole;
  absl::StatusOr<Manifest> manifest = ReadManifest(path);
  if (!manifest.ok()) return whole;
  *elsewhere = FindKeptElsewhere(path, *manifest);
  if (elsewhere->files.empty()) return whole;
  for (const ManifestFile& file : manifest->files) {
    if (elsewhere->Has(file.name)) continue;
    MUSTER_RETURN_IF_ERROR(VerifyCheckpointFile(path, file, level));
  }
  return manifest;
}

// Reads again if a running job has replaced or removed the checkpoint meanwhile, because a mixture
// of two checkpoints is not damage.
Checkpoint Look(const std::string& path, VerifyLevel level) {
  Checkpoint checkpoint;
  (void)RetryUntilUnchanged([&] {
    checkpoint = {.path = path};
    checkpoint.folder = FileIdentityAt(path);
    checkpoint.seal = ReadSeal(path);
    checkpoint.has_pin = HasPin(path);
    checkpoint.manifest = VerifyHere(path, level, &checkpoint.elsewhere);
    return FileIdentityAt(path) == checkpoint.folder;
  });
  return checkpoint;
}

// Whether it was removed since it was listed. A checkpoint that was moved aside and cannot be put
// back still exists, under another name.
bool WasRemoved(const Checkpoint& checkpoint) {
  return absl::IsNotFound(checkpoint.manifest.status()) && !PathExists(checkpoint.path);
}

void LookAndAdd(const std::string& path, VerifyLevel level, std::vector<Checkpoint>* found) {
  Checkpoint checkpoint = Look(path, level);
  if (!WasRemoved(checkpoint)) found->push_back(std::move(checkpoint));
}

bool IsPart(const Checkpoint& checkpoint) {
  return checkpoint.manifest.ok() && !checkpoint.elsewhere.files.empty();
}

// According to the folder, whatever the coordinator says.
bool IsPinned(const Checkpoint& checkpoint) {
  return checkpoint.has_pin || (checkpoint.seal.ok() && checkpoint.seal->pinned);
}

absl::StatusOr<std::vector<Checkpoint>> FindNumbered(const CheckpointFolder& folder,
                                                     VerifyLevel level) {
  std::vector<Checkpoint> found;
  MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers, folder.Numbers());
  for (const int64_t number : numbers) LookAndAdd(folder.PathOf(number), level, &found);
  return found;
}

// Returns the checkpoints in the folder `path` that the program named itself, with
// save_state(path): by step and name.
absl::StatusOr<std::vector<Checkpoint>> FindNamed(const std::string& path, VerifyLevel level) {
  std::vector<Checkpoint> found;
  if (!IsFolder(path)) return found;
  MUSTER_ASSIGN_OR_RETURN(const std::vector<std::string> names, ListDirectory(path));
  for (const std::string& name : names) {
    const std::string dir = JoinPath(path, name);
    const bool is_temporary = HasMark(name, StemOf(name, kStagingMark), kStagingMark) ||
                              HasMark(name, StemOf(name, kReplacedMark), kReplacedMark);
    if (is_temporary || IsNumberedName(name) || !IsCheckpoint(dir)) continue;
    LookAndAdd(dir, level, &found);
  }
  const auto place = [](const Checkpoint& checkpoint) {
    return std::make_pair(checkpoint.manifest.ok() ? checkpoint.manifest->info.step
                                                   : std::numeric_limits<int64_t>::max(),
                          checkpoint.path);
  };
  std::sort(found.begin(), found.end(), [&](const Checkpoint& one, const Checkpoint& other) {
    return place(one) < place(other);
  });
  return found;
}

// Returns the checkpoint at `path`, or all those of a folder.
absl::StatusOr<std::vector<Checkpoint>> Find(const std::string& path, VerifyLevel level) {
  std::vector<Checkpoint> found;
  if (IsCheckpoint(path)) {
    found.push_back(Look(path, level));
    return found;
  }
  MUSTER_ASSIGN_OR_RETURN(std::vector<Checkpoint> named, FindNamed(path, level));
  const absl::StatusOr<CheckpointFolder> folder = FindRoot(path);
  if (!folder.ok() && (named.empty() || !absl::IsNotFound(folder.status()))) {
    return folder.status();
  }
  if (folder.ok()) {
    MUSTER_ASSIGN_OR_RETURN(found, FindNumbered(*folder, level));
  }
  std::move(named.begin(), named.end(), std::back_inserter(found));
  return found;
}

std::string StateOf(const Checkpoint& checkpoint) {
  if (checkpoint.manifest.ok() && !checkpoint.trust.ok()) return "untrusted";
  if (checkpoint.manifest.ok()) return IsPart(checkpoint) ? "part" : "complete";
  const absl::Status& why = checkpoint.manifest.status();
  return absl::IsNotFound(why)        ? "incomplete"
         : absl::IsUnimplemented(why) ? "newer"
         : absl::IsDataLoss(why)      ? "damaged"
                                      : "unreadable";
}

// What is registered for a checkpoint, by the coordinator or else in seal.json.
struct Registration {
  bool by_coordinator = false;
  std::string state = "sealed";
  bool promoted = false;
  bool pinned = false;
  bool is_signed = false;
};

std::optional<Registration> RegistrationOf(const Checkpoint& checkpoint) {
  if (!checkpoint.seal.ok()) return std::nullopt;
  Registration registration = {.promoted = checkpoint.seal->promoted,
                               .pinned = checkpoint.seal->pinned,
                               .is_signed = !checkpoint.seal->signature.empty()};
  if (!checkpoint.registered.has_value()) return registration;
  registration.by_coordinator = true;
  registration.state = checkpoint.registered->state;
  registration.promoted = checkpoint.registered->promoted;
  registration.pinned = checkpoint.registered->pinned;
  return registration;
}

std::string RegistrationText(const Checkpoint& checkpoint) {
  const std::optional<Registration> registration = RegistrationOf(checkpoint);
  if (!registration.has_value()) {
    return absl::StrCat(
        absl::IsNotFound(checkpoint.seal.status()) ? "not registered" : "unreadable record",
        checkpoint.has_pin ? ", pinned" : "");
  }
  return absl::StrCat(registration->state, registration->promoted ? ", promoted" : ", held back",
                      registration->pinned || checkpoint.has_pin ? ", pinned" : "",
                      registration->is_signed ? ", signed" : "");
}

// Returns the bytes of the files in the folder.
uint64_t BytesOf(const Checkpoint& checkpoint) {
  uint64_t bytes = 0;
  for (const ManifestFile& file : checkpoint.manifest->files) {
    if (!checkpoint.elsewhere.Has(file.name)) bytes += file.digest.bytes;
  }
  return bytes;
}

// Returns "7 files", or "2 of 7 files" for a part.
std::string FilesText(const Checkpoint& checkpoint) {
  const size_t all = checkpoint.manifest->files.size();
  const std::string text = Plural(all, "file");
  return IsPart(checkpoint) ? absl::StrCat(all - checkpoint.elsewhere.files.size(), " of ", text)
                            : text;
}

std::string PartText(const Checkpoint& checkpoint) {
  return IsPart(checkpoint)
             ? absl::StrCat("; ", Shown(checkpoint.elsewhere.nodes), " has the others")
             : "";
}

ordered_json ToJson(const Checkpoint& checkpoint) {
  ordered_json json = {{"path", checkpoint.path}, {"state", StateOf(checkpoint)}};
  if (!checkpoint.manifest.ok()) {
    json["why"] = std::string(checkpoint.manifest.status().message());
    return json;
  }
  const Manifest& manifest = *checkpoint.manifest;
  json["iteration"] = manifest.info.iteration;
  json["step"] = manifest.info.step;
  json["epoch"] = manifest.info.epoch;
  json["world_size"] = manifest.info.world_size;
  json["created"] = manifest.created;
  json["files"] = manifest.files.size() - checkpoint.elsewhere.files.size();
  json["bytes"] = BytesOf(checkpoint);
  if (IsPart(checkpoint)) {
    json["elsewhere"] = {{"files", checkpoint.elsewhere.files},
                         {"nodes", checkpoint.elsewhere.nodes}};
  }
  json["pinned"] = IsPinned(checkpoint);
  json["registration"] = nullptr;
  if (const auto registration = RegistrationOf(checkpoint); registration.has_value()) {
    json["registration"] = {{"by", registration->by_coordinator ? "coordinator" : kSealName},
                            {"job", checkpoint.seal->job},
                            {"id", checkpoint.seal->id},
                            {"state", registration->state},
                            {"promoted", registration->promoted},
                            {"pinned", registration->pinned},
                            {"signed", registration->is_signed},
                            {"sha256", checkpoint.seal->sha256}};
  }
  if (!checkpoint.trust.ok()) json["why"] = std::string(checkpoint.trust.message());
  if (!checkpoint.lacks.empty()) json["lacks_name"] = checkpoint.lacks;
  return json;
}

std::string ToText(const Checkpoint& checkpoint) {
  if (!checkpoint.manifest.ok() || !checkpoint.trust.ok()) {
    return absl::StrCat(Shown(checkpoint.path), "  ", StateOf(checkpoint), ": ",
                        Shown(checkpoint.manifest.ok() ? checkpoint.trust.message()
                                                       : checkpoint.manifest.status().message()),
                        "\n");
  }
  const Manifest& manifest = *checkpoint.manifest;
  return absl::StrCat(
      Shown(checkpoint.path), "  step ", manifest.info.step, "  epoch ", manifest.info.epoch, "  ",
      manifest.info.world_size == 1 ? "1 process"
                                    : absl::StrCat(manifest.info.world_size, " processes"),
      "  ", FilesText(checkpoint), "  ", HumanBytes(BytesOf(checkpoint)), "  ",
      Shown(manifest.created), "  ", RegistrationText(checkpoint), PartText(checkpoint), "\n");
}

// Returns the saves at `path` that are no checkpoints yet: with its name, in it, and in its
// "checkpoints".
absl::StatusOr<std::vector<UnfinishedSave>> FindUnfinished(const std::string& path) {
  MUSTER_ASSIGN_OR_RETURN(std::vector<UnfinishedSave> saves, UnfinishedSavesOf(path));
  if (!IsFolder(path) || IsCheckpoint(path)) return saves;
  for (const std::string& root : {path, JoinPath(path, "checkpoints")}) {
    if (!IsFolder(root)) continue;
    MUSTER_ASSIGN_OR_RETURN(const std::vector<UnfinishedSave> more, UnfinishedSavesIn(root));
    saves.insert(saves.end(), more.begin(), more.end());
  }
  return saves;
}

// Returns sealed saves that lack only their final name and whose writers are gone: whole
// checkpoints.
absl::StatusOr<std::vector<UnfinishedSave>> FindUnnamed(const std::string& path) {
  MUSTER_ASSIGN_OR_RETURN(std::vector<UnfinishedSave> saves, FindUnfinished(path));
  saves.erase(std::remove_if(saves.begin(), saves.end(),
                             [](const UnfinishedSave& save) {
                               return !save.sealed || save.writer == FolderWriter::kAlive;
                             }),
              saves.end());
  return saves;
}

// Does the same as Find, and adds the checkpoints that lack only their name.
absl::StatusOr<std::vector<Checkpoint>> FindAll(const std::string& path, VerifyLevel level) {
  // First, so that one that gets its name meanwhile is found under it.
  MUSTER_ASSIGN_OR_RETURN(const std::vector<UnfinishedSave> unnamed, FindUnnamed(path));
  absl::StatusOr<std::vector<Checkpoint>> found = Find(path, level);
  if (!unnamed.empty() && absl::IsNotFound(found.status())) found = std::vector<Checkpoint>();
  MUSTER_RETURN_IF_ERROR(found.status());
  for (const UnfinishedSave& save : unnamed) {
    Checkpoint checkpoint = Look(save.path, level);
    if (PathExists(save.path)) {
      checkpoint.lacks = save.checkpoint;
      found->push_back(std::move(checkpoint));
      continue;
    }
    // It has received its name, perhaps after the others were read, or was removed.
    if (!PathExists(save.checkpoint)) continue;
    const auto same = std::find_if(found->begin(), found->end(), [&](const Checkpoint& other) {
      std::error_code error;
      return std::filesystem::equivalent(other.path, save.checkpoint, error);
    });
    if (same == found->end()) {
      found->push_back(Look(save.checkpoint, level));
    } else if (!same->manifest.ok()) {
      *same = Look(same->path, level);
    }
  }
  if (!unnamed.empty() && found->empty()) {
    return absl::NotFoundError(
        absl::StrCat("the checkpoints of ", path, " were removed while they were read"));
  }
  return found;
}

std::string StateOf(const UnfinishedSave& save) {
  switch (save.writer) {
    case FolderWriter::kAlive:
      return "saving";
    case FolderWriter::kGone:
      return "abandoned";
    case FolderWriter::kUnknown:
      break;
  }
  return "unknown";
}

// The clocks of file servers may be ahead.
absl::Duration AgeOf(const UnfinishedSave& save) {
  return std::max(absl::Now() - save.changed, absl::ZeroDuration());
}

ordered_json ToJson(const UnfinishedSave& save) {
  return {{"path", save.path},
          {"checkpoint", save.checkpoint},
          {"state", StateOf(save)},
          {"sealed", save.sealed},
          {"asked", save.asked},
          {"bytes", save.bytes},
          {"changed", absl::FormatTime(absl::RFC3339_sec, save.changed, absl::UTCTimeZone())},
          {"age_s", absl::ToDoubleSeconds(AgeOf(save))}};
}

std::string ToText(const UnfinishedSave& save) {
  std::string text = absl::StrCat(Shown(save.path), "  no checkpoint yet, ");
  // Retention counts only numbered saves; the remains of the others are only found by later saves
  // of the same name.
  const std::string name = BaseName(save.checkpoint);
  const bool numbered = IsNumberedName(name);
  switch (save.writer) {
    case FolderWriter::kAlive:
      absl::StrAppend(&text, "being saved");
      break;
    case FolderWriter::kGone:
      absl::StrAppend(&text, "abandoned: its process has ended; ");
      if (save.sealed && !numbered) {
        absl::StrAppend(&text, "it is sealed: load it by this folder, or rename that to ",
                        Shown(name));
      } else if (save.sealed) {
        absl::StrAppend(&text, "it is sealed: the next load or save, or muster checkpoints prune, ",
                        "may give it its name");
      } else if (save.asked) {
        absl::StrAppend(&text, "only the coordinator of its job knows whether it is sealed: the ",
                        "next load or save of that job asks",
                        numbered ? "" : "; where there is none any more, remove it by hand");
      } else {
        absl::StrAppend(&text, "the next save ",
                        numbered ? "" : absl::StrCat("of ", Shown(name), " "), "removes it");
      }
      break;
    case FolderWriter::kUnknown:
      absl::StrAppend(&text, "being saved or abandoned: this machine cannot tell");
      break;
  }
  return absl::StrCat(text, "  ", HumanBytes(save.bytes), " on the disk, changed ",
                      HumanDuration(AgeOf(save)), " ago\n");
}

// --- Tensors ---

// Opens the files with tensors below `path`, by their names in messages: those of a checkpoint, or
// one set of weights under the empty name.
absl::StatusOr<std::map<std::string, WeightFiles>> OpenAll(const std::string& path) {
  std::map<std::string, WeightFiles> files;
  if (!IsCheckpoint(path)) {
    MUSTER_ASSIGN_OR_RETURN(WeightFiles weights, WeightFiles::Open(path));
    files.emplace("", std::move(weights));
    return files;
  }
  KeptElsewhere elsewhere;
  MUSTER_ASSIGN_OR_RETURN(const Manifest manifest,
                          VerifyHere(path, VerifyLevel::kSizes, &elsewhere));
  // A model in several files is a single set, if all of them are here.
  std::set<std::string> parts;
  for (int model = 0;; ++model) {
    const std::string name = ModelFileName(model);
    MUSTER_ASSIGN_OR_RETURN(const std::vector<std::string> of_model, FilesOfModel(manifest, name));
    if (of_model.empty()) break;
    if (manifest.Find(name) != nullptr) continue;
    if (elsewhere.HasAny(of_model)) continue;
    parts.insert(of_model.begin(), of_model.end());
    MUSTER_ASSIGN_OR_RETURN(WeightFiles weights,
                            WeightFiles::Open(JoinPath(path, IndexFileName(name))));
    files.emplace(name, std::move(weights));
  }
  for (const ManifestFile& file : manifest.files) {
    if (!absl::EndsWith(file.name, ".safetensors") || parts.count(file.name) > 0) continue;
    if (elsewhere.Has(file.name)) continue;
    MUSTER_ASSIGN_OR_RETURN(WeightFiles weights, WeightFiles::Open(JoinPath(path, file.name)));
    files.emplace(file.name, std::move(weights));
  }
  return files;
}

// Adds what the coordinators of the checkpoints' jobs have registered, if they can be reached.
absl::Status AskCoordinators(const Call& call, std::vector<Checkpoint>* checkpoints) {
  std::map<std::string, std::vector<RegisteredState>> of_job;
  for (Checkpoint& checkpoint : *checkpoints) {
    // Without a job, no coordinator has sealed it.
    if (!checkpoint.seal.ok() || checkpoint.seal->job.empty()) continue;
    const std::string& job = checkpoint.seal->job;
    auto known = of_job.find(job);
    if (known == of_job.end()) {
      auto states = FindRegisteredStates(call.line, call.context, job);
      if (!states.ok() && call.line.Has("coordinator")) return states.status();
      if (!states.ok()) {
        call.context.err << call.spec.name << ": the coordinator of job " << Printable(job)
                         << " does not answer, states are those of seal.json: "
                         << Printable(states.status().message()) << "\n";
      }
      known = of_job.emplace(job, std::move(states).value_or(std::vector<RegisteredState>())).first;
    }
    for (const RegisteredState& state : known->second) {
      if (state.sha256 == checkpoint.seal->sha256) checkpoint.registered = state;
    }
  }
  return absl::OkStatus();
}

int RunList(const Call& call) {
  const std::string path = call.line.words.empty() ? "." : call.line.words[0];
  // First, so that a save that ends meanwhile is in at least one of the two lists.
  const auto unfinished = FindUnfinished(path);
  auto found = Find(path, VerifyLevel::kSizes);
  if (absl::IsNotFound(found.status()) && unfinished.ok() && !unfinished->empty()) {
    found = std::vector<Checkpoint>();
  }
  if (!found.ok()) return Fail(call, found.status());
  if (!unfinished.ok()) return Fail(call, unfinished.status());
  if (const absl::Status asked = AskCoordinators(call, &*found); !asked.ok()) {
    return Fail(call, asked);
  }
  if (!call.json) {
    for (const Checkpoint& checkpoint : *found) call.context.out << ToText(checkpoint);
    for (const UnfinishedSave& save : *unfinished) call.context.out << ToText(save);
    return kExitOk;
  }
  ordered_json checkpoints = ordered_json::array(), saves = ordered_json::array();
  for (const Checkpoint& checkpoint : *found) checkpoints.push_back(ToJson(checkpoint));
  for (const UnfinishedSave& save : *unfinished) saves.push_back(ToJson(save));
  call.context.out << Dump({{"checkpoints", checkpoints}, {"unfinished", saves}});
  return kExitOk;
}

int RunInspect(const Call& call) {
  const std::string& path = call.line.words[0];
  const auto files = OpenAll(path);
  if (!files.ok()) return Fail(call, files.status());
  ordered_json json = {{"path", path}};
  std::string text;
  if (IsCheckpoint(path)) {
    const Checkpoint checkpoint = Look(path, VerifyLevel::kSizes);
    if (!checkpoint.manifest.ok()) return Fail(call, checkpoint.manifest.status());
    json = ToJson(checkpoint);
    text = ToText(checkpoint);
    json["micro_step"] = checkpoint.manifest->info.micro_step;
    json["cursor"] = checkpoint.manifest->info.cursor;
    ordered_json list = ordered_json::array();
    for (const ManifestFile& file : checkpoint.manifest->files) {
      list.push_back({{"name", file.name},
                      {"rank", file.rank},
                      {"bytes", file.digest.bytes},
                      {"xxh3", file.digest.xxh3}});
      absl::StrAppend(&text, "  ", Shown(file.name), "  ", HumanBytes(file.digest.bytes),
                      "  by rank ", file.rank,
                      checkpoint.elsewhere.Has(file.name) ? ", not here" : "", "\n");
    }
    json["files"] = list;
  }
  ordered_json tensors = ordered_json::array();
  for (const auto& [file, weights] : *files) {
    for (const WeightFiles::Entry& entry : weights.entries()) {
      const std::string in = file.empty() ? BaseName(weights.FileOf(entry)) : file;
      const std::string type(SafetensorsTypeName(entry.tensor.type));
      tensors.push_back({{"file", in},
                         {"name", entry.tensor.name},
                         {"dtype", type},
                         {"shape", entry.tensor.shape},
                         {"bytes", WeightFiles::BytesOf(entry)}});
      absl::StrAppend(&text, Shown(in), ": ", Shown(entry.tensor.name), "  ", type, " ",
                      ShapeText(entry.tensor.shape), "\n");
    }
  }
  json["tensors"] = tensors;
  if (text.empty()) text = absl::StrCat(Shown(path), ": no tensors\n");
  call.context.out << (call.json ? Dump(json) : text);
  return kExitOk;
}

// Returns OK if the files are those that the coordinator sealed and, with a key, that it signed.
absl::Status TrustIn(const Checkpoint& checkpoint, const std::optional<VerifyingKey>& key,
                     const std::string& key_file) {
  if (absl::IsNotFound(checkpoint.seal.status())) {
    if (!key.has_value()) return absl::OkStatus();
    return absl::DataLossError(
        absl::StrCat(checkpoint.path, " is not signed: it has no ", kSealName));
  }
  MUSTER_RETURN_IF_ERROR(checkpoint.seal.status());
  return CheckSeal(checkpoint.path, *checkpoint.manifest, *checkpoint.seal,
                   key.has_value() ? &*key : nullptr, key_file);
}

// Tells the coordinator of the checkpoint's job what verify has found.
absl::Status ReportVerdict(const Call& call, const Checkpoint& checkpoint, VerifyLevel level) {
  if (!checkpoint.seal.ok()) {
    return absl::NotFoundError(
        absl::StrCat(checkpoint.path, ": ", checkpoint.seal.status().message(),
                     "; only the coordinator that sealed a checkpoint records the result"));
  }
  if (checkpoint.seal->job.empty() && !call.line.Has("job")) {
    return absl::NotFoundError(absl::StrCat(
        checkpoint.path,
        " was sealed without a coordinator, so there is none to report the result to"));
  }
  const absl::Status& read = checkpoint.manifest.status();
  // Files that cannot be read may be whole.
  if (!read.ok() && !absl::IsDataLoss(read) && !absl::IsNotFound(read)) return read;
  // A missing signature is not damage.
  const absl::Status verdict = read.ok() ? TrustIn(checkpoint, std::nullopt, "") : read;
  return ReportFoundState(call.line, call.context,
                          call.line.Has("job") ? call.line.Get("job") : checkpoint.seal->job,
                          {.id = checkpoint.seal->id,
                           .sha256 = checkpoint.seal->sha256,
                           .contents = level == VerifyLevel::kContents,
                           .damage = verdict.ok() ? "" : std::string(verdict.message())});
}

int RunVerify(const Call& call) {
  const VerifyLevel level =
      call.line.Get("sizes") == "true" ? VerifyLevel::kSizes : VerifyLevel::kContents;
  const std::string key_file = call.line.Get("public_key");
  std::optional<VerifyingKey> key;
  if (call.line.Has("public_key")) {
    const auto pem = ReadFile(key_file, kLargestKeyFile);
    if (!pem.ok()) return Fail(call, pem.status());
    auto parsed = VerifyingKey::Parse(*pem, absl::StrCat("--public_key: ", key_file));
    if (!parsed.ok()) return Fail(call, parsed.status());
    key = *std::move(parsed);
  }
  auto found = FindAll(call.line.words[0], level);
  if (!found.ok()) return Fail(call, found.status());
  int code = kExitOk;
  ordered_json list = ordered_json::array();
  for (Checkpoint& checkpoint : *found) {
    bool known = true;
    (void)RetryUntilUnchanged([&] {
      if (!std::exchange(known, false)) {
        const std::string lacks = std::move(checkpoint.lacks);
        checkpoint = Look(checkpoint.path, level);
        checkpoint.lacks = lacks;
      }
      if (!checkpoint.manifest.ok()) return true;
      checkpoint.trust = TrustIn(checkpoint, key, key_file);
      // The checkpoint may have been replaced while others were read.
      return checkpoint.trust.ok() || FileIdentityAt(checkpoint.path) == checkpoint.folder;
    });
    // Or it was removed, like those that LookAndAdd() leaves out.
    if (found->size() > 1 && WasRemoved(checkpoint)) continue;
    const bool good = checkpoint.manifest.ok() && checkpoint.trust.ok();
    if (!good) code = kExitJobFailed;
    if (call.line.Get("report") == "true") {
      if (const absl::Status told = ReportVerdict(call, checkpoint, level); !told.ok()) {
        call.context.err << call.spec.name << ": not reported: " << Printable(told.message(), 1000)
                         << "\n";
        if (code == kExitOk) code = ExitCodeOf(told);
      }
    }
    if (call.json) {
      ordered_json json = ToJson(checkpoint);
      if (key.has_value()) json["signed_by_key"] = good;
      list.push_back(std::move(json));
    } else if (good) {
      call.context.out << Shown(checkpoint.path) << "  ok, " << FilesText(checkpoint) << ", "
                       << HumanBytes(BytesOf(checkpoint))
                       << (key.has_value() ? absl::StrCat(", signed by the key of ", key_file) : "")
                       << (checkpoint.lacks.empty()
                               ? ""
                               : absl::StrCat(", lacks only the name ", Shown(checkpoint.lacks)))
                       << PartText(checkpoint) << "\n";
    } else {
      call.context.out << ToText(checkpoint);
    }
  }
  if (call.json) call.context.out << Dump({{"checkpoints", list}});
  return code;
}

// Reads the numbers and texts in a checkpoint's file, an object by name; null if the file is for
// none.
absl::StatusOr<nlohmann::json> ScalarsOf(const std::string& path) {
  nlohmann::json scalars;
  if (absl::EndsWith(path, ".json")) {
    MUSTER_ASSIGN_OR_RETURN(const std::string text, ReadRecordFile(path));
    MUSTER_ASSIGN_OR_RETURN(const nlohmann::json all, ParseJson(text, path));
    if (all.is_object()) scalars = all.value("scalars", nlohmann::json());
  } else if (absl::EndsWith(path, ".safetensors")) {
    MUSTER_ASSIGN_OR_RETURN(const SafetensorsHeader header, ReadSafetensorsHeader(path));
    if (!header.metadata.has_value()) return scalars;
    const auto found = header.metadata->find("muster.scalars");
    if (found == header.metadata->end()) return scalars;
    MUSTER_ASSIGN_OR_RETURN(scalars, ParseJson(found->second, path));
  }
  if (scalars.is_null() || scalars.is_object()) return scalars;
  return absl::DataLossError(absl::StrCat(path, ": its scalars are no object"));
}

// Reads them by file, for files that have any.
absl::StatusOr<std::map<std::string, nlohmann::json>> ScalarsOfAll(const std::string& path) {
  KeptElsewhere elsewhere;
  MUSTER_ASSIGN_OR_RETURN(const Manifest manifest,
                          VerifyHere(path, VerifyLevel::kSizes, &elsewhere));
  std::map<std::string, nlohmann::json> scalars;
  for (const ManifestFile& file : manifest.files) {
    if (elsewhere.Has(file.name)) continue;
    MUSTER_ASSIGN_OR_RETURN(nlohmann::json of_file, ScalarsOf(JoinPath(path, file.name)));
    if (!of_file.is_null()) scalars.emplace(file.name, std::move(of_file));
  }
  return scalars;
}

std::string ScalarText(const nlohmann::json& scalar) {
  return scalar.is_null() ? "nothing" : Printable(scalar.dump(), 200);
}

// Returns a name of the same tensor as `entry` of `here` that `there` has, too; null if there is
// none.
const std::string* OtherNameOf(const WeightFiles& here, const WeightFiles::Entry& entry,
                               const WeightFiles& there) {
  const std::string storage = here.StorageOf(entry);
  if (storage.empty()) return nullptr;
  for (const WeightFiles::Entry& other : here.entries()) {
    if (other.tensor.name == entry.tensor.name || here.StorageOf(other) != storage) continue;
    if (there.Find(other.tensor.name) != nullptr) return &other.tensor.name;
  }
  return nullptr;
}

int RunDiff(const Call& call) {
  const auto first = OpenAll(call.line.words[0]);
  if (!first.ok()) return Fail(call, first.status());
  const auto second = OpenAll(call.line.words[1]);
  if (!second.ok()) return Fail(call, second.status());
  // To compare the weights of a checkpoint with weights alone, model.safetensors is meant.
  const auto pick = [](const std::map<std::string, WeightFiles>& files, const std::string& name,
                       bool other_is_weights) -> const WeightFiles* {
    auto found = files.find(name);
    if (found == files.end() && name.empty()) found = files.find(ModelFileName(0));
    if (found == files.end() && other_is_weights) found = files.find("");
    return found == files.end() ? nullptr : &found->second;
  };
  const bool first_is_weights = first->count("") != 0, second_is_weights = second->count("") != 0;
  std::vector<std::string> names;
  if (first_is_weights || second_is_weights) {
    names.push_back("");
  } else {
    for (const auto& [name, files] : *first) names.push_back(name);
    for (const auto& [name, files] : *second) {
      if (first->count(name) == 0) names.push_back(name);
    }
  }
  ordered_json list = ordered_json::array(), tied = ordered_json::array();
  std::string text;
  uint64_t same = 0;
  const auto note = [&](const std::string& what, const std::string& file, const std::string& name,
                        const std::string& words, ordered_json more) {
    ordered_json item = {{"what", what}, {"file", file}, {"name", name}};
    item.update(more);
    list.push_back(item);
    absl::StrAppend(&text, Shown(file), file.empty() || name.empty() ? "" : ": ", Shown(name), "  ",
                    words, "\n");
  };
  // Notes a name that one side leaves out, if its tensor has another name that both sides have:
  // that name is compared.
  const auto note_tied = [&](const std::string& file, const WeightFiles& here,
                             const WeightFiles::Entry& entry, const WeightFiles& there,
                             const char* which) {
    const std::string* const other = OtherNameOf(here, entry, there);
    if (other == nullptr) return false;
    tied.push_back({{"file", file}, {"name", entry.tensor.name}, {"same_as", *other}});
    absl::StrAppend(&text, Shown(file), file.empty() ? "" : ": ", Shown(entry.tensor.name),
                    "  the same tensor as ", Shown(*other), ", a name that only the ", which,
                    " has\n");
    return true;
  };
  for (const std::string& file : names) {
    const WeightFiles* const a = pick(*first, file, first_is_weights);
    const WeightFiles* const b = pick(*second, file, second_is_weights);
    if (a == nullptr || b == nullptr) {
      note(a == nullptr ? "only_second" : "only_first", file, "",
           a == nullptr ? "only in the second" : "only in the first", ordered_json::object());
      continue;
    }
    for (const WeightFiles::Entry& entry : a->entries()) {
      const std::string& name = entry.tensor.name;
      const WeightFiles::Entry* const other = b->Find(name);
      if (other == nullptr) {
        if (note_tied(file, *a, entry, *b, "first")) continue;
        note("only_first", file, name, "only in the first", ordered_json::object());
        continue;
      }
      const auto difference = CompareTensors(*a, entry, *b, *other);
      if (!difference.ok()) return Fail(call, difference.status());
      if (difference->equal) {
        ++same;
      } else if (!difference->shape.empty()) {
        note("shape", file, name, difference->shape, {{"shapes", difference->shape}});
      } else if (!difference->not_compared.empty()) {
        note("not_compared", file, name, Shown(difference->not_compared),
             {{"reason", difference->not_compared}});
      } else {
        ordered_json more = {{"elements", difference->elements},
                             {"differing", difference->differing}};
        if (const std::optional<double> largest = difference->largest; largest.has_value()) {
          // JSON has no number for it.
          more["largest"] = std::isinf(*largest) ? ordered_json("inf") : ordered_json(*largest);
        }
        note("values", file, name,
             absl::StrCat(difference->differing, " of ", difference->elements, " elements differ",
                          difference->largest.has_value()
                              ? absl::StrFormat(", by at most %.6g", *difference->largest)
                              : ""),
             more);
      }
    }
    for (const WeightFiles::Entry& entry : b->entries()) {
      if (a->Find(entry.tensor.name) != nullptr) continue;
      if (note_tied(file, *b, entry, *a, "second")) continue;
      note("only_second", file, entry.tensor.name, "only in the second", ordered_json::object());
    }
  }
  if (IsCheckpoint(call.line.words[0]) && IsCheckpoint(call.line.words[1])) {
    const auto a = ScalarsOfAll(call.line.words[0]), b = ScalarsOfAll(call.line.words[1]);
    if (!a.ok()) return Fail(call, a.status());
    if (!b.ok()) return Fail(call, b.status());
    std::set<std::string> files;
    for (const auto* all : {&*a, &*b}) {
      for (const auto& [file, scalars] : *all) files.insert(file);
    }
    for (const std::string& file : files) {
      const auto first_of = a->find(file), second_of = b->find(file);
      if (first_of == a->end() || second_of == b->end()) {
        // Files with tensors are named above.
        if (!absl::EndsWith(file, ".json")) continue;
        const bool first_only = second_of == b->end();
        note(first_only ? "only_first" : "only_second", file, "",
             first_only ? "only in the first" : "only in the second", ordered_json::object());
        continue;
      }
      const nlohmann::json none;  // null, which is never a scalar
      std::set<std::string> scalars;
      for (const nlohmann::json* all : {&first_of->second, &second_of->second}) {
        for (const auto& [name, value] : all->items()) scalars.insert(name);
      }
      for (const std::string& name : scalars) {
        const nlohmann::json x = first_of->second.value(name, none);
        const nlohmann::json y = second_of->second.value(name, none);
        if (x == y) continue;
        note("scalar", file, name, absl::StrCat(ScalarText(x), " and ", ScalarText(y)),
             {{"first", x}, {"second", y}});
      }
    }
  }
  if (call.json) {
    call.context.out << Dump(
        {{"equal", list.empty()}, {"same", same}, {"differences", list}, {"tied", tied}});
  } else {
    call.context.out << text << Plural(same, "tensor") << " equal, "
                     << Plural(list.size(), "difference") << "\n";
  }
  return list.empty() ? kExitOk : kExitJobFailed;
}

// Whether `to` has the name of a file of torch.save: a folder with that name would be taken for one
// until it is read.
bool IsPickleName(const std::string& to) {
  std::error_code error;
  return (absl::EndsWith(to, ".bin") || absl::EndsWith(to, ".pt") || absl::EndsWith(to, ".pth") ||
          absl::EndsWith(to, ".ckpt")) &&
         !std::filesystem::is_directory(to, error);
}

// The end of export and merge-weights.
int Copy(const Call& call, const std::string& from, const std::string& to) {
  if (IsPickleName(to)) {
    return Fail(call, absl::InvalidArgumentError(
                          absl::StrCat(to,
                                       ": only safetensors are written: TO is a folder, or a "
                                       "file *.safetensors")));
  }
  int64_t limit = 10'000'000'000;
  if (call.line.Has("max_shard_size")) {
    const auto size = ParseSizeOption(call.line.Get("max_shard_size"));
    if (!size.ok()) return Fail(call, size.status());
    limit = *size;
  }
  const auto weights = WeightFiles::Open(from);
  if (!weights.ok()) return Fail(call, weights.status());
  const auto copied = CopyWeights(*weights, to, limit);
  if (!copied.ok()) return Fail(call, copied.status());
  if (call.json) {
    call.context.out << Dump({{"to", to},
                              {"files", copied->files},
                              {"tensors", copied->tensors},
                              {"bytes", copied->bytes},
                              {"left_out", copied->left_out}});
    return kExitOk;
  }
  call.context.out << "wrote " << Plural(copied->tensors, "tensor") << ", "
                   << HumanBytes(copied->bytes) << ", to " << to << " ("
                   << Plural(copied->files.size(), "file") << ")\n";
  for (const std::string& name : copied->left_out) {
    call.context.out << "left out " << Shown(name) << ", the same tensor under another name\n";
  }
  return kExitOk;
}

int RunExport(const Call& call) {
  const std::string& path = call.line.words[0];
  int model = 0;
  if (call.line.Has("model") && (!absl::SimpleAtoi(call.line.Get("model"), &model) || model < 0)) {
    return Fail(call, absl::InvalidArgumentError(absl::StrCat("--model ", call.line.Get("model"),
                                                              ": write its number, from 0 to ",
                                                              std::numeric_limits<int>::max())));
  }
  KeptElsewhere elsewhere;
  const auto manifest = VerifyHere(path, VerifyLevel::kSizes, &elsewhere);
  if (absl::IsNotFound(manifest.status()) && IsFolder(path)) {
    return Fail(call, absl::NotFoundError(absl::StrCat(manifest.status().message(),
                                                       CheckpointsInPlaceOfWeights(path))));
  }
  if (!manifest.ok()) return Fail(call, manifest.status());
  const std::string name = ModelFileName(model);
  const auto files = FilesOfModel(*manifest, name);
  if (!files.ok()) return Fail(call, files.status());
  if (files->empty()) {
    return Fail(call, absl::NotFoundError(absl::StrCat(path, " holds no ", name)));
  }
  for (const std::string& part : *files) {
    if (elsewhere.Has(part)) {
      return Fail(call, absl::FailedPreconditionError(
                            absl::StrCat(DescribePart(path, elsewhere),
                                         ": export its model there, or copy those files here")));
    }
    const std::string from = JoinPath(path, part);
    const auto digest = DigestFile(from);
    if (!digest.ok()) return Fail(call, digest.status());
    const FileDigest& expected = manifest->Find(part)->digest;
    if (*digest != expected) {
      return Fail(
          call, absl::DataLossError(absl::StrCat(
                    from, ": is damaged: its contents have the digest ", digest->xxh3,
                    ", but the manifest says ", expected.xxh3, "; export an earlier checkpoint")));
    }
  }
  const bool whole = manifest->Find(name) != nullptr;
  return Copy(call, JoinPath(path, whole ? name : IndexFileName(name)), call.line.words[1]);
}

// Adds what to do about weights that are damaged; returns other errors unchanged.
absl::Status WithWayOut(const absl::Status& status) {
  if (!absl::IsDataLoss(status)) return status;
  return absl::DataLossError(
      absl::StrCat(status.message(), "; use the weights of an earlier checkpoint"));
}

// Refuses a part of a checkpoint that lacks the model: another file in it might be taken for the
// model.
absl::Status CheckModelIsHere(const std::string& from) {
  if (!IsFolder(from)) return absl::OkStatus();
  const absl::StatusOr<Manifest> manifest = ReadManifest(from);
  if (!manifest.ok()) return absl::OkStatus();
  const KeptElsewhere elsewhere = FindKeptElsewhere(from, *manifest);
  const auto files = FilesOfModel(*manifest, ModelFileName(0));
  if (!files.ok() || !elsewhere.HasAny(*files)) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      DescribePart(from, elsewhere), ": take the weights there, or copy those files here"));
}

// The manifest has the digests of weights in a checkpoint, so damaged files are never copied.
absl::Status CheckAgainstManifests(const std::string& from) {
  MUSTER_RETURN_IF_ERROR(CheckModelIsHere(from));
  const absl::StatusOr<WeightFiles> weights = WeightFiles::Open(from);
  if (!weights.ok()) {
    if (!PathExists(from)) return weights.status();
    // The files of a damaged checkpoint may not even open.
    const std::string folder = IsFolder(from) ? from : ParentPath(from);
    KeptElsewhere elsewhere;
    const absl::Status whole = VerifyHere(folder, VerifyLevel::kContents, &elsewhere).status();
    return absl::IsDataLoss(whole) ? WithWayOut(whole) : weights.status();
  }
  for (const std::string& path : weights->Files()) {
    const std::string dir = ParentPath(path);
    const absl::StatusOr<Manifest> manifest = ReadManifest(dir);
    // There is no manifest, or it is another program's file.
    if (absl::IsNotFound(manifest.status()) || StaysUnreadable(manifest.status())) continue;
    MUSTER_RETURN_IF_ERROR(manifest.status());
    const ManifestFile* const file = manifest->Find(BaseName(path));
    if (file == nullptr) continue;
    MUSTER_RETURN_IF_ERROR(WithWayOut(VerifyCheckpointFile(dir, *file, VerifyLevel::kContents)));
  }
  return absl::OkStatus();
}

int RunMerge(const Call& call) {
  const std::string& from = call.line.words[0];
  if (const absl::Status whole = CheckAgainstManifests(from); !whole.ok()) return Fail(call, whole);
  return Copy(call, from, call.line.words[1]);
}

// Why prune stops at a checkpoint. A damaged one may be removed; one that cannot be read here may
// be good.
absl::Status StopsPrune(const absl::Status& why) {
  const bool damaged = absl::IsDataLoss(why) || absl::IsInvalidArgument(why);
  return absl::FailedPreconditionError(
      absl::StrCat(why.message(), "; nothing was removed",
                   damaged ? ": remove this checkpoint first" : ", since it may be one to keep"));
}

// The checkpoint that an unfinished save has moved aside and would have replaced; empty: none.
std::string AsideOf(const std::string& checkpoint) {
  const std::string parent = ParentPath(checkpoint);
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(parent);
  for (const std::string& name : names.value_or(std::vector<std::string>())) {
    if (HasMark(name, BaseName(checkpoint), kReplacedMark)) return JoinPath(parent, name);
  }
  return "";
}

// Gives sealed checkpoints whose writers are gone their final names, if these are free (a load
// might never do it). `dry_run`: only reports which. Checkpoints that cannot be renamed stay
// unchanged.
absl::StatusOr<std::vector<UnfinishedSave>> NameSealedOnes(const Call& call, bool dry_run) {
  std::vector<UnfinishedSave> named;
  MUSTER_ASSIGN_OR_RETURN(const std::vector<UnfinishedSave> unnamed,
                          FindUnnamed(call.line.words[0]));
  for (const UnfinishedSave& save : unnamed) {
    if (!IsNumberedName(BaseName(save.checkpoint))) continue;
    const auto whole = [&] { return VerifyCheckpoint(save.path, VerifyLevel::kContents).status(); };
    const bool is_taken = PathExists(JoinPath(save.checkpoint, kManifestName)) ||
                          std::any_of(named.begin(), named.end(), [&](const UnfinishedSave& other) {
                            return other.checkpoint == save.checkpoint;
                          });
    const std::string aside = AsideOf(save.checkpoint);
    absl::Status stays;
    if (save.writer != FolderWriter::kGone) {
      stays =
          absl::FailedPreconditionError("this machine cannot tell whether its process has ended");
    } else if (is_taken) {
      stays = absl::AlreadyExistsError("another checkpoint has that name");
    } else if (!aside.empty()) {
      // The next save would remove that checkpoint once the name is taken.
      stays = absl::AlreadyExistsError(absl::StrCat(aside, " had that name before it"));
    } else if (stays = whole(); stays.ok() && !dry_run) {
      // The slow part runs before the lock is taken, so that concurrent loads do not wait for it.
      const absl::StatusOr<std::string> path =
          NameStaging(save.checkpoint, save.path, [] { return absl::OkStatus(); });
      stays = path.ok() && *path == save.path
                  ? absl::FailedPreconditionError("the log above says why")
                  : path.status();
    }
    if (stays.ok()) {
      named.push_back(save);
      continue;
    }
    call.context.err << call.spec.name << ": " << Shown(save.path)
                     << " is sealed and lacks only the name " << Shown(save.checkpoint)
                     << ", which it does not get: " << Shown(stays.message()) << "\n";
  }
  return named;
}

int64_t NumberOf(const std::string& path) {
  int64_t number = 0;
  (void)absl::SimpleAtoi(BaseName(path).substr(BaseName(path).rfind('_') + 1), &number);
  return number;
}

// Returns the saves of which only a coordinator knows whether they are sealed, whose writers are
// gone, and which are older than the newest `keep` of `numbers` (ascending). Retention counts them
// as checkpoints, too.
absl::StatusOr<std::vector<std::string>> AskedBefore(const CheckpointFolder& folder,
                                                     const std::vector<int64_t>& numbers,
                                                     int64_t keep) {
  std::vector<std::string> asked;
  if (static_cast<int64_t>(numbers.size()) < keep) return asked;
  const int64_t oldest_kept = numbers[numbers.size() - static_cast<size_t>(keep)];
  MUSTER_ASSIGN_OR_RETURN(const std::vector<UnfinishedSave> saves,
                          UnfinishedSavesIn(folder.root()));
  for (const UnfinishedSave& save : saves) {
    if (save.asked && save.writer == FolderWriter::kGone &&
        IsNumberedName(BaseName(save.checkpoint)) && NumberOf(save.checkpoint) < oldest_kept) {
      asked.push_back(save.path);
    }
  }
  return asked;
}

int RunPrune(const Call& call) {
  int64_t keep = 0;
  if (!absl::SimpleAtoi(call.line.Get("keep"), &keep) || keep < 1) {
    return Fail(call, absl::InvalidArgumentError(
                          call.line.Has("keep") ? absl::StrCat("--keep ", call.line.Get("keep"),
                                                               ": write a number from 1 to ",
                                                               std::numeric_limits<int64_t>::max())
                                                : "say how many to keep: --keep N"));
  }
  const bool dry_run = call.line.Get("dry_run") == "true";
  const auto named = NameSealedOnes(call, dry_run);
  if (!named.ok()) return Fail(call, named.status());
  auto folder = FindRoot(call.line.words[0]);
  absl::StatusOr<std::vector<Checkpoint>> found = std::vector<Checkpoint>();
  if (dry_run && !named->empty() && absl::IsNotFound(folder.status())) {
    // These would be the only ones.
    folder = CheckpointFolder(ParentPath(named->front().checkpoint));
  } else if (folder.ok()) {
    // Checkpoints with names that the program chose belong to the program and have no place in the
    // order.
    found = FindNumbered(*folder, VerifyLevel::kSizes);
  }
  if (!folder.ok()) return Fail(call, folder.status());
  if (!found.ok()) return Fail(call, found.status());
  // The names that they would get count.
  std::map<std::string, std::string> where;
  for (const UnfinishedSave& save : *named) {
    if (!dry_run || ParentPath(save.checkpoint) != folder->root()) continue;
    where[save.checkpoint] = save.path;
    Checkpoint checkpoint = Look(save.path, VerifyLevel::kSizes);
    checkpoint.path = save.checkpoint;
    found->push_back(std::move(checkpoint));
  }
  std::sort(found->begin(), found->end(), [](const Checkpoint& a, const Checkpoint& b) {
    return NumberOf(a.path) < NumberOf(b.path);
  });
  std::vector<std::string> complete, pinned;
  std::string to_resume;  // the newest that is not held back
  for (const Checkpoint& checkpoint : *found) {
    if (IsPart(checkpoint)) {
      // Each node would keep the newest that it has, and no two nodes the same.
      return Fail(call, absl::FailedPreconditionError(absl::StrCat(
                            DescribePart(checkpoint.path, checkpoint.elsewhere),
                            "; nothing was removed: options.checkpoint.keep removes old ones on "
                            "all nodes together, or remove the same folders on every node")));
    }
    if (checkpoint.manifest.ok()) {
      if (!checkpoint.seal.ok() && !absl::IsNotFound(checkpoint.seal.status())) {
        return Fail(call, absl::FailedPreconditionError(absl::StrCat(
                              checkpoint.seal.status().message(),
                              "; nothing was removed: the checkpoint may be pinned. Use a version "
                              "of muster that can read this file, or remove the file")));
      }
      (IsPinned(checkpoint) ? pinned : complete).push_back(checkpoint.path);
      if (!checkpoint.seal.ok() || checkpoint.seal->promoted) to_resume = checkpoint.path;
    } else if (!absl::IsNotFound(checkpoint.manifest.status())) {
      // A damaged one would count as one to keep, and a good one would be removed.
      return Fail(call, StopsPrune(checkpoint.manifest.status()));
    }
  }
  const size_t older =
      complete.size() - std::min<uint64_t>(complete.size(), static_cast<uint64_t>(keep));
  std::vector<std::string> removed;
  for (size_t i = 0; i < complete.size(); ++i) {
    // The checkpoint that a resume would use stays, however many newer ones were held back.
    if (i < older && complete[i] != to_resume) {
      removed.push_back(complete[i]);
      continue;
    }
    // Sizes do not show a flipped bit, so the checkpoints that stay are read.
    const auto at = where.find(complete[i]);
    const auto whole =
        VerifyCheckpoint(at == where.end() ? complete[i] : at->second, VerifyLevel::kContents);
    if (!whole.ok()) return Fail(call, StopsPrune(whole.status()));
  }
  std::vector<int64_t> numbers;
  for (const std::string& path : complete) numbers.push_back(NumberOf(path));
  const absl::StatusOr<std::vector<std::string>> asked = AskedBefore(*folder, numbers, keep);
  if (!asked.ok()) return Fail(call, asked.status());
  absl::Status failed;  // the first one that stays; the others are removed
  if (!dry_run) {
    std::vector<std::string> gone;
    for (const std::string& path : removed) {
      const absl::Status status = RemoveCheckpoint(path);
      failed.Update(status);
      if (status.ok()) gone.push_back(path);
    }
    removed = std::move(gone);
    if (!asked->empty()) failed.Update(folder->RemoveAsked(numbers, static_cast<int>(keep)));
    failed.Update(SyncDirectory(folder->root()));
  }
  for (const std::string& path : *asked) {
    if (dry_run || !PathExists(path)) removed.push_back(path);
  }
  if (call.json) {
    std::vector<std::string> names;
    for (const UnfinishedSave& save : *named) names.push_back(save.checkpoint);
    call.context.out << Dump(
        {{"dry_run", dry_run}, {"named", names}, {"removed", removed}, {"pinned", pinned}});
    return failed.ok() ? kExitOk : Fail(call, failed);
  }
  for (const UnfinishedSave& save : *named) {
    call.context.out << (dry_run ? "would name " : "named ") << Shown(save.checkpoint)
                     << ", which was sealed when its process ended\n";
  }
  for (const std::string& path : removed) {
    call.context.out << (dry_run ? "would remove " : "removed ") << path << "\n";
  }
  if (!failed.ok()) return Fail(call, failed);
  if (removed.empty()) call.context.out << "nothing to remove\n";
  return kExitOk;
}

const OptionSpec kShardSize = {.name = "max_shard_size",
                               .value_name = "SIZE",
                               .help = "Shards with an index beyond this size (default 10GB)"};

struct Subcommand {
  CommandSpec spec;
  size_t min_words;
  int (*run)(const Call&);
};

std::vector<Subcommand> Subcommands() {
  return {
      {{.name = "muster checkpoints list",
        .summary = "Lists the checkpoints of a folder, with step, epoch and size.",
        .usage = "[FOLDER] [OPTIONS]",
        .details =
            "FOLDER holds checkpoint_0, checkpoint_1, ..., or a folder checkpoints with "
            "them; by default the current one.\nThe state at the end of a line is that of "
            "seal.json, or of the coordinator if one is named or runs the job:\nsealed or "
            "published, promoted or held back, pinned, signed; not registered: saved "
            "without a coordinator.\nSaves that are being written are listed last, and those "
            "that a process left when it ended; neither is a checkpoint.",
        .options = ConnectionOptions({}),
        .max_words = 1},
       0,
       RunList},
      {{.name = "muster checkpoints inspect",
        .summary = "Shows what is in a checkpoint, or in files of weights: files and tensors.",
        .usage = "PATH [OPTIONS]",
        .max_words = 1},
       1,
       RunInspect},
      {{.name = "muster checkpoints verify",
        .summary = "Reads a checkpoint, or all of a folder, and compares every file's digest.",
        .usage = "PATH [OPTIONS]",
        .details = "A checkpoint that was sealed must fit its record, seal.json. Sealed "
                   "ones that lack only their name are read, too.\n"
                   "With --report its coordinator remembers the verdict: no resume takes a damaged "
                   "one until it is found whole.",
        .options = ConnectionOptions(
            {{.name = "sizes", .help = "Compare the sizes of files only"},
             {.name = "public_key",
              .value_name = "FILE",
              .help = "Ed25519 key (PEM): each checkpoint must be sealed and signed by the "
                      "coordinator that has its private key (--checkpoint_key)"},
             {.name = "report", .help = "Tell the coordinator of each checkpoint's job"},
             {.name = "job",
              .value_name = "JOB",
              .help = "With --report: the job that has it now, if another one sealed it"}}),
        .max_words = 1},
       1,
       RunVerify},
      {{.name = "muster checkpoints diff",
        .summary = "Compares the tensors of two checkpoints, or of files of weights.",
        .usage = "FIRST SECOND [OPTIONS]",
        .details = "Between two checkpoints, compares also the numbers and texts of their state. "
                   "Between a checkpoint and bare\nweights, compares model.safetensors.",
        .max_words = 2},
       2,
       RunDiff},
      {{.name = "muster checkpoints export",
        .summary = "Writes a model of a checkpoint as safetensors files that other libraries read.",
        .usage = "CHECKPOINT TO [OPTIONS]",
        .details = "TO is a folder, or a file *.safetensors.",
        .options = {{.name = "model", .value_name = "N", .help = "Which model, from 0 (default 0)"},
                    kShardSize},
        .max_words = 2},
       2,
       RunExport},
      {{.name = "muster checkpoints prune",
        .summary = "Removes the oldest complete checkpoints of a folder.",
        .usage = "FOLDER --keep N [OPTIONS]",
        .details =
            "Incomplete ones and saves that are being written do not count and stay, and so do "
            "those that are pinned: by\ntheir seal.json or by muster checkpoints pin FOLDER. A "
            "damaged "
            "one stops the command. Before, sealed ones whose process ended before it gave "
            "them\ntheir name "
            "(checkpoint_3.tmp-...) get it, unless another one has it. It contacts no "
            "coordinator.",
        .options = {{.name = "keep", .value_name = "N", .help = "How many to keep, 1 or more"},
                    {.name = "dry_run", .help = "Print which ones, and remove nothing"}},
        .max_words = 1},
       1,
       RunPrune},
  };
}

}  // namespace

int RunCheckpointsCommand(const std::vector<std::string>& args, const CommandContext& context) {
  const std::vector<Subcommand> all = Subcommands();
  const std::string prefix = "muster checkpoints ";
  const auto help = [&](std::ostream& out) {
    out << "Inspects checkpoints and weights on disk; needs no coordinator.\n"
           "Usage: muster checkpoints COMMAND [OPTIONS]\n\nCommands:\n";
    for (const Subcommand& subcommand : all) {
      out << absl::StrFormat("  %-10s %s\n", subcommand.spec.name.substr(prefix.size()),
                             subcommand.spec.summary);
    }
    out << "\nThe coordinator's records of a job's checkpoints: registered, pin, unpin, promote, "
           "hold-back.\npin and unpin also take a folder, without a coordinator.\n\nmuster "
           "checkpoints COMMAND --help has details.\n";
  };
  if (context.describe != nullptr) {
    context.describe({.name = "muster checkpoints",
                      .summary = "Lists, checks, compares, exports, prunes, pins or promotes "
                                 "checkpoints.",
                      .usage = "COMMAND [OPTIONS]"});
    for (const Subcommand& subcommand : all) Run(subcommand.spec, {}, context, 0, subcommand.run);
    return kExitOk;
  }
  if (args.empty()) {
    help(context.err);
    return kExitUsage;
  }
  if (args[0] == "--help" || args[0] == "-h") {
    help(context.out);
    return kExitOk;
  }
  std::vector<std::string> names;
  for (const Subcommand& subcommand : all) {
    names.push_back(subcommand.spec.name.substr(prefix.size()));
    if (names.back() != args[0]) continue;
    return Run(subcommand.spec, {args.begin() + 1, args.end()}, context, subcommand.min_words,
               subcommand.run);
  }
  context.err << "muster checkpoints: unknown command " << args[0]
              << DidYouMean(args[0], names, prefix) << "; see muster checkpoints --help\n";
  return kExitUsage;
}

int RunMergeWeightsCommand(const std::vector<std::string>& args, const CommandContext& context) {
  return Run(
      {.name = "muster merge-weights",
       .summary = "Writes weights as safetensors: shards into one file, or pytorch_model.bin "
                  "without Python.",
       .usage = "FROM TO [OPTIONS]",
       .details = "FROM is a folder, an index or a file of safetensors or torch.save, which "
                  "is not executed; TO a folder,\nor a file *.safetensors. Of a tensor with "
                  "several names the first is kept.",
       .options = {kShardSize},
       .max_words = 2},
      args, context, 2, RunMerge);
}

}  // namespace muster::client
