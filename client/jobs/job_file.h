#ifndef MUSTER_CLIENT_JOBS_JOB_FILE_H_
#define MUSTER_CLIENT_JOBS_JOB_FILE_H_

#include <map>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "client/jobs/job_types.h"

namespace muster::client {

// A key of job.yaml, and the flag of the same name of `muster submit`.
struct JobSettingSpec {
  std::string name;
  std::string value_name;  // empty: a flag without a value
  std::string help;
  bool repeated = false;  // the flag may be given more than once
  bool has_flag = true;   // `command` is what follows the flags
};
const std::vector<JobSettingSpec>& JobSettings();

// Reads "4" or "1:4", as in the setting `processes`. INVALID_ARGUMENT says what to write.
absl::StatusOr<std::pair<int, int>> ParseProcesses(absl::string_view text);
std::string ProcessesText(const JobSpec& spec);

struct GivenSetting {
  std::string text;
  std::string source;  // "--processes", "job.yaml:3", "the command line"
};

struct ResolvedJob {
  JobSpec spec;
  std::map<std::string, GivenSetting> provenance;  // of the settings that are not the default
  // Files and folders to read into spec.files: see ReadJobFiles.
  std::vector<std::string> paths = {};
};

// Combines a job file (empty text: none), flags and the program's words, which replace `command`. A
// flag wins over the file; `env` and `labels` of both are merged, name by name. Pure. Errors:
// INVALID_ARGUMENT, one line that names the flag, or file, line and key, and what to write.
absl::StatusOr<ResolvedJob> ResolveJob(absl::string_view text, absl::string_view source,
                                       const std::map<std::string, std::vector<std::string>>& flags,
                                       const std::vector<std::string>& program);

// Does the same for a file that Muster, perhaps an older version, has written: env and sizes of
// memory are taken literally.
absl::StatusOr<ResolvedJob> ResolveRecord(absl::string_view text, absl::string_view source);

// Returns all settings of a specification, by their keys.
nlohmann::ordered_json SettingsJson(const JobSpec& spec);
// Returns the job file of a specification: JSON, which is also YAML, of the settings that are not
// the default. ResolveJob reads the same specification from it.
std::string JobFileText(const JobSpec& spec);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_JOBS_JOB_FILE_H_
