#include "coordinator/jobs/job_spec.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/signature.h"
#include "base/worker_variables.h"
#include "coordinator/errors.h"
#include "coordinator/jobs/placement.h"
#include "proto/failure_policy.h"
#include "proto/job_limits.h"
#include "proto/name_value.h"

namespace muster::coordinator {
namespace {

constexpr int kMaxProcesses = 1'000'000;  // the limit of the runner, too
constexpr int kMaxAccumulation = 1'000'000;
constexpr int64_t kMaxMemory = int64_t{1} << 50;
constexpr absl::Duration kMaxGrace = absl::Hours(1);
constexpr int kMaxSpares = 1024;
// The restarts after all limited classes together. A runner would refuse a larger number as a flag.
constexpr int kMaxRestartsOfJob = static_cast<int>(std::size(kLimitedClasses)) * kMaxRestarts;

using Error = std::optional<v1::OpError>;

bool HasNul(absl::string_view text) { return absl::StrContains(text, absl::string_view("\0", 1)); }

Error CheckJobName(absl::string_view name) {
  // A command would take a name that begins with '-' for an option.
  if (IsJobName(name) && name[0] != '-') return std::nullopt;
  return BadField(
      "spec.name",
      absl::StrCat("name ", Quoted(name), " does not name a job: use 1 to ", kMaxJobName,
                   " letters, digits, '-' and '_', and no '-' at the beginning"));
}

Error CheckProgram(const v1::JobSpec& spec) {
  if (spec.argv_size() == 0 || spec.argv(0).empty()) {
    return BadField("spec.argv",
                    "the job has no program: give argv, the program and its arguments");
  }
  for (const std::string& word : spec.argv()) {
    if (HasNul(word)) return BadField("spec.argv", "an argument contains a NUL byte");
  }
  for (const v1::NameValue& variable : spec.env()) {
    const std::string &key = variable.name(), &value = variable.value();
    if (key.empty() || absl::StrContains(key, '=') || HasNul(key) || HasNul(value)) {
      return BadField("spec.env", absl::StrCat("env ", Quoted(key),
                                               " is not a variable: a name is not empty and has no "
                                               "'=', and neither part has a NUL byte"));
    }
    // These variables would be lost silently.
    if (key == "CUDA_VISIBLE_DEVICES" && spec.per_process().gpus() > 0) {
      return BadField("spec.env",
                      "env CUDA_VISIBLE_DEVICES cannot be set: the agent of each node sets it to "
                      "the GPUs that the job has there");
    }
    if (const WorkerVariable* const set = FindWorkerVariable(key)) {
      const bool is_field = v1::JobSpec::descriptor()->FindFieldByName(std::string(set->setting));
      return BadField(
          "spec.env",
          absl::StrCat("env ", key, " cannot be set: ",
                       is_field ? absl::StrCat("set the field ", set->setting, " instead")
                                : "the agent of each node sets it for each process"));
    }
  }
  const std::string& folder = spec.working_directory();
  if (!folder.empty() && (folder[0] != '/' || HasNul(folder))) {
    return BadField("spec.working_directory",
                    absl::StrCat("working_directory ", Quoted(folder),
                                 " is relative: give an absolute path, which every node has"));
  }
  return std::nullopt;
}

void SortByName(NameValues* values) {
  std::sort(values->begin(), values->end(),
            [](const v1::NameValue& a, const v1::NameValue& b) { return a.name() < b.name(); });
}

// `values` must be sorted by name.
Error CheckNames(absl::string_view field, const NameValues& values) {
  const auto twice = std::adjacent_find(
      values.begin(), values.end(),
      [](const v1::NameValue& a, const v1::NameValue& b) { return a.name() == b.name(); });
  if (twice == values.end()) return std::nullopt;
  return BadField(absl::StrCat("spec.", field),
                  absl::StrCat(field, " has two values of ", Quoted(twice->name()), ": give one"));
}

// The files must be sorted by path.
Error CheckFiles(const v1::JobSpec& spec) {
  if (spec.files_size() > kMaxFiles) {
    return TooLarge("spec.files",
                    absl::StrCat("the job has ", spec.files_size(), " files: at most ", kMaxFiles));
  }
  absl::flat_hash_set<absl::string_view> paths;
  size_t bytes = 0;
  for (const v1::JobFile& file : spec.files()) {
    if (!IsJobFilePath(file.path())) {
      return BadField("spec.files", absl::StrCat("file ", Quoted(file.path()),
                                                 " has no path below the folder of an attempt: "
                                                 "give one without . and .., of at most ",
                                                 kMaxFilePath, " bytes"));
    }
    if (!paths.insert(file.path()).second) {
      return BadField("spec.files", absl::StrCat("file ", Quoted(file.path()), " is there twice"));
    }
    if (file.sha256() != Sha256(file.content())) {
      return BadField("spec.files", absl::StrCat("file ", Quoted(file.path()),
                                                 " has not the content that its sha256 says"));
    }
    bytes += file.content().size();
  }
  if (bytes > kMaxFileBytes) {
    return TooLarge("spec.files",
                    absl::StrCat("the files of the job have ", bytes, " bytes: at most ",
                                 kMaxFileBytes, "; put larger ones where all nodes see them"));
  }
  for (const v1::JobFile& file : spec.files()) {
    for (size_t end = file.path().find('/'); end != std::string::npos;
         end = file.path().find('/', end + 1)) {
      if (!paths.contains(absl::string_view(file.path()).substr(0, end))) continue;
      return BadField("spec.files", absl::StrCat("file ", Quoted(file.path().substr(0, end)),
                                                 " is also the folder of ", Quoted(file.path())));
    }
  }
  return std::nullopt;
}

// The limits must be sorted by class.
Error CheckClassLimits(const v1::JobSpec& spec) {
  for (int i = 0; i < spec.class_limits_size(); ++i) {
    const v1::ClassCount& limit = spec.class_limits(i);
    const std::string name = v1::EndClass_Name(limit.end_class());
    if (limit.end_class() == v1::END_CLASS_UNSPECIFIED ||
        LimitedClass(limit.end_class()) != limit.end_class()) {
      return BadField(
          "spec.class_limits",
          absl::StrCat("class ", name.empty() ? absl::StrCat(limit.end_class()) : name,
                       " has no limit of restarts: PROCESS_FAILED, OUT_OF_MEMORY, HANG, "
                       "NODE_LOST and PREEMPTED have"));
    }
    if (limit.count() < 0) {
      return BadField("spec.class_limits", absl::StrCat("the limit of ", name, " is ",
                                                        limit.count(), ": give 0 or more"));
    }
    if (i > 0 && spec.class_limits(i - 1).end_class() == limit.end_class()) {
      return BadField("spec.class_limits",
                      absl::StrCat("class ", name, " has two limits: give one"));
    }
  }
  return std::nullopt;
}

Error CheckDuration(absl::string_view field, bool given, const google::protobuf::Duration& value,
                    absl::Duration at_least) {
  if (!given || FromProto(value) >= at_least) return std::nullopt;
  return BadField(absl::StrCat("spec.", field),
                  absl::StrCat(field, " is ", absl::FormatDuration(FromProto(value)), ": give ",
                               absl::FormatDuration(at_least), " or more, or leave it out"));
}

void FillProcesses(v1::JobSpec* spec) {
  if (spec->min_processes() == 0) spec->set_min_processes(spec->max_processes());
  if (spec->max_processes() == 0) spec->set_max_processes(spec->min_processes());
}

Error CheckProcesses(const v1::JobSpec& spec) {
  if (spec.min_processes() == 0 && spec.max_processes() == 0) {
    return BadField("spec.max_processes", "the number of processes is missing: give max_processes");
  }
  if (spec.min_processes() < 1 || spec.max_processes() < spec.min_processes() ||
      spec.max_processes() > kMaxProcesses) {
    return BadField(
        "spec.min_processes",
        absl::StrCat("a job needs 1 <= min_processes <= max_processes <= ", kMaxProcesses, ", not ",
                     spec.min_processes(), ":", spec.max_processes()));
  }
  const int each = spec.processes_per_node();
  if (each < 0) {
    return BadField("spec.processes_per_node",
                    absl::StrCat("processes_per_node is ", each, ": give 1 or more, or 0 for any"));
  }
  if (each > 0 && spec.max_processes() / each * each < spec.min_processes()) {
    return BadField(
        "spec.processes_per_node",
        absl::StrCat("no number of processes from ", spec.min_processes(), " to ",
                     spec.max_processes(), " is a multiple of processes_per_node ", each));
  }
  return std::nullopt;
}

}  // namespace

void FillJobSpec(v1::JobSpec* spec) {
  SortByName(spec->mutable_env());
  SortByName(spec->mutable_node_labels());
  std::sort(spec->mutable_files()->begin(), spec->mutable_files()->end(),
            [](const v1::JobFile& a, const v1::JobFile& b) { return a.path() < b.path(); });
  for (v1::JobFile& file : *spec->mutable_files()) {
    if (file.sha256().empty()) file.set_sha256(Sha256(file.content()));
    file.set_size(static_cast<int64_t>(file.content().size()));
  }
  auto* const limits = spec->mutable_class_limits();
  std::sort(limits->begin(), limits->end(), [](const v1::ClassCount& a, const v1::ClassCount& b) {
    return a.end_class() < b.end_class();
  });
  FillProcesses(spec);
  v1::ProcessResources* const process = spec->mutable_per_process();
  if (process->cpus() == 0) process->set_cpus(1);
  if (!spec->has_stop_grace()) *spec->mutable_stop_grace() = ToProto(absl::Seconds(30));
}

uint64_t HashJobSpec(const v1::JobSpec& spec) {
  const std::string bytes = spec.SerializeAsString();
  uint64_t hash =
      0xcbf29ce484222325;  // FNV-1a: need not resist attacks, since the caller chooses the key
  for (const unsigned char byte : bytes) hash = (hash ^ byte) * 0x100000001b3;
  return hash;
}

Error CompleteProcesses(v1::JobSpec* spec) {
  FillProcesses(spec);
  return CheckProcesses(*spec);
}

Error CheckSpecSize(const v1::JobSpec& spec) {
  const size_t bytes = spec.ByteSizeLong();
  if (bytes <= kMaxSpecBytes) return std::nullopt;
  return TooLarge("spec", absl::StrCat("the specification has ", bytes, " bytes: at most ",
                                       kMaxSpecBytes, "; put large values into a file"));
}

Error CheckFilledJobSpec(const v1::JobSpec& spec) {
  if (Error error = CheckJobName(spec.name())) return error;
  if (Error error = CheckProgram(spec)) return error;
  if (Error error = CheckNames("env", spec.env())) return error;
  if (Error error = CheckNames("node_labels", spec.node_labels())) return error;
  if (Error error = CheckFiles(spec)) return error;
  if (Error error = CheckClassLimits(spec)) return error;
  if (Error error = CheckProcesses(spec)) return error;
  const v1::ProcessResources* const process = &spec.per_process();
  const std::pair<const char*, int64_t> amounts[] = {
      {"gpus", process->gpus()},
      {"cpus", process->cpus()},
      {"memory_bytes", process->memory_bytes()},
      {"gpu_memory_bytes", process->gpu_memory_bytes()}};
  for (const auto& [field, amount] : amounts) {
    if (amount < 0) {
      return BadField(absl::StrCat("spec.per_process.", field),
                      absl::StrCat(field, " is ", amount, ": give 0 or more"));
    }
  }
  if (process->gpu_memory_bytes() > 0 && process->gpus() == 0) {
    return BadField("spec.per_process.gpu_memory_bytes",
                    "gpu_memory_bytes is that of each GPU, and the processes have none: give gpus, "
                    "or leave it out");
  }
  if (spec.max_restarts() < 0 || spec.max_restarts() > kMaxRestartsOfJob) {
    return BadField("spec.max_restarts", absl::StrCat("max_restarts is ", spec.max_restarts(),
                                                      ": give 0 to ", kMaxRestartsOfJob));
  }
  if (spec.gradient_accumulation_steps() < 0 ||
      spec.gradient_accumulation_steps() > kMaxAccumulation) {
    return BadField(
        "spec.gradient_accumulation_steps",
        absl::StrCat("gradient_accumulation_steps is ", spec.gradient_accumulation_steps(),
                     ": give 1 to ", kMaxAccumulation));
  }
  if (spec.spare_nodes() < 0 || spec.spare_nodes() > kMaxSpares) {
    return BadField("spec.spare_nodes", absl::StrCat("spare_nodes is ", spec.spare_nodes(),
                                                     ": give 0 to ", kMaxSpares));
  }
  const std::pair<const char*, int64_t> memories[] = {
      {"memory_bytes", process->memory_bytes()}, {"gpu_memory_bytes", process->gpu_memory_bytes()}};
  for (const auto& [field, bytes] : memories) {
    if (bytes > kMaxMemory) {
      return BadField(absl::StrCat("spec.per_process.", field),
                      absl::StrCat(field, " is ", bytes, ": give at most ", kMaxMemory));
    }
  }
  if (FromProto(spec.stop_grace()) > kMaxGrace) {
    return BadField(
        "spec.stop_grace",
        absl::StrCat("stop_grace is ", absl::FormatDuration(FromProto(spec.stop_grace())),
                     ": give at most ", absl::FormatDuration(kMaxGrace)));
  }
  const std::string& precision = spec.mixed_precision();
  if (!precision.empty() && precision != "no" && precision != "bf16" && precision != "fp16") {
    return BadField("spec.mixed_precision", absl::StrCat("mixed_precision ", Quoted(precision),
                                                         " is unknown: use no, bf16 or fp16"));
  }
  if (Error error =
          CheckDuration("time_limit", spec.has_time_limit(), spec.time_limit(), absl::Seconds(1)))
    return error;
  if (Error error = CheckDuration("stop_grace", spec.has_stop_grace(), spec.stop_grace(),
                                  absl::ZeroDuration()))
    return error;
  if (Error error = CheckDuration("restart_delay", spec.has_restart_delay(), spec.restart_delay(),
                                  absl::ZeroDuration()))
    return error;
  if (FromProto(spec.restart_delay()) > kMaxRestartDelay) {
    return BadField(
        "spec.restart_delay",
        absl::StrCat("restart_delay is ", absl::FormatDuration(FromProto(spec.restart_delay())),
                     ": give at most ", absl::FormatDuration(kMaxRestartDelay)));
  }
  if (Error error = CheckDuration("grow_after", spec.has_grow_after(), spec.grow_after(),
                                  absl::ZeroDuration()))
    return error;
  if (Error error =
          CheckDuration("retention", spec.has_retention(), spec.retention(), absl::Seconds(1)))
    return error;
  if (Error error = CheckDuration("hang_timeout", spec.has_hang_timeout(), spec.hang_timeout(),
                                  kLeastHangTimeout))
    return error;
  if (spec.has_grow_after() && spec.min_processes() == spec.max_processes()) {
    return BadField("spec.grow_after",
                    absl::StrCat("grow_after is of no use to a job of always ", DescribeSize(spec),
                                 ": give a range of processes, or leave it out"));
  }
  return std::nullopt;
}

Error CompleteJobSpec(v1::JobSpec* spec) {
  if (Error error = CheckSpecSize(*spec)) return error;
  FillJobSpec(spec);
  return CheckFilledJobSpec(*spec);
}

}  // namespace muster::coordinator
