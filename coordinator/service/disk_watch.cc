#include "coordinator/service/disk_watch.h"

#include <errno.h>
#include <sys/statvfs.h>

#include <filesystem>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/size_pair.h"

namespace muster::coordinator {

DiskJudgement JudgeDisk(const std::string& path, const DiskSizes& sizes, const DiskLimits& limits) {
  const std::string directory = OneLine(path);  // for messages, which take only UTF-8
  DiskJudgement judgement;
  const auto free = [&](const std::string& text) {
    return absl::StrCat("the file system of ", directory, " has ", text, " left, less than ");
  };
  if (sizes.free < limits.free_least) {
    const SizePair texts = HumanBytesApart(sizes.free, limits.free_least);
    judgement.no_room = absl::StrCat(
        free(texts.first), "the ", texts.second,
        " that are kept for jobs that are submitted already: no job can be submitted; free space "
        "there, or lower --disk_free_least_mib");
    judgement.warnings.push_back(judgement.no_room);
  } else if (sizes.free < limits.free_warning) {
    const SizePair texts = HumanBytesApart(sizes.free, limits.free_warning);
    judgement.warnings.push_back(
        absl::StrCat(free(texts.first), texts.second, " (--disk_free_warning_mib)"));
  }
  if (limits.size_warning > 0 && sizes.used > limits.size_warning) {
    const SizePair texts = HumanBytesApart(sizes.used, limits.size_warning);
    judgement.warnings.push_back(absl::StrCat(
        directory, " has ", texts.first, ", more than ", texts.second,
        " (--journal_size_warning_mib): remove what is not needed, such as lost-* folders and jobs "
        "that have ended; journal.db keeps its size, and new records use what is deleted"));
  }
  return judgement;
}

absl::StatusOr<DiskSizes> MeasureDisk(const std::string& directory) {
  struct statvfs info;
  if (statvfs(directory.c_str(), &info) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot measure ", directory));
  }
  DiskSizes sizes;
  sizes.free = static_cast<int64_t>(info.f_bavail) * static_cast<int64_t>(info.f_frsize);
  std::error_code error;
  for (std::filesystem::recursive_directory_iterator it(directory, error), end; !error && it != end;
       it.increment(error)) {
    std::error_code gone;  // snapshots come and go
    if (it->is_symlink(gone) || !it->is_regular_file(gone)) continue;
    const auto bytes = it->file_size(gone);
    if (!gone) sizes.used += static_cast<int64_t>(bytes);
  }
  return sizes;
}

DiskWatch::DiskWatch(Options options)
    : options_([&options] {
        if (options.measure == nullptr) {
          options.measure = [directory = options.directory] { return MeasureDisk(directory); };
        }
        return std::move(options);
      }()),
      timer_([this] { return Tick(); }, options_.clock) {}

void DiskWatch::Start() {
  Tick();
  timer_.Start();
}

absl::Time DiskWatch::Tick() {
  const absl::StatusOr<DiskSizes> sizes = options_.measure();
  const absl::Time next = options_.clock->Now() + kPeriod;
  DiskJudgement judgement;
  bool changed = false, more = false;
  {
    MutexLock lock(&mu_);
    if (!sizes.ok()) {
      // The last judgement stays in force.
      if (!std::exchange(failed_, true)) MUSTER_LOG(Warning) << sizes.status().message();
      return next;
    }
    failed_ = false;
    sizes_ = *sizes;
    judgement = JudgeDisk(options_.directory, sizes_, options_.limits);
    const bool room = judgement.no_room.empty();
    changed = room != has_room_ || judgement.warnings.size() != warnings_;
    more = !judgement.warnings.empty();
    has_room_ = room;
    warnings_ = judgement.warnings.size();
  }
  if (changed && more) {
    for (const std::string& warning : judgement.warnings) MUSTER_LOG(Warning) << warning;
  } else if (changed) {
    MUSTER_LOG(Info) << options_.directory << " and its file system are within their limits again";
  }
  options_.on_judged(judgement);
  return next;
}

DiskSizes DiskWatch::sizes() const {
  MutexLock lock(&mu_);
  return sizes_;
}

bool DiskWatch::has_room() const {
  MutexLock lock(&mu_);
  return has_room_;
}

}  // namespace muster::coordinator
