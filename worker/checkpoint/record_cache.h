#ifndef MUSTER_WORKER_CHECKPOINT_RECORD_CACHE_H_
#define MUSTER_WORKER_CHECKPOINT_RECORD_CACHE_H_

#include <sys/stat.h>

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/file.h"
#include "base/mutex.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/sealing.h"

namespace muster {

// The records of the checkpoints in a folder: numbered ones, those that a program has named, and
// those that lack their names. Each record is read once, as long as its seal.json stays as it is;
// later calls only check that file's state. Thread-safe.
template <class Record>
class RecordCache {
 public:
  // `read` returns the wanted part of the record of the checkpoint in the folder `dir`; nullopt: it
  // cannot be read, and is left out.
  using Read = std::optional<Record> (*)(const std::string& dir);
  explicit RecordCache(Read read) : read_(read) {}

  // Returns the records of the folders in `parent`. Blocks on the disk.
  std::vector<Record> ReadAll(const std::string& parent);

 private:
  // Identifies a file's state when it was read: device, inode, size, and time of the last change.
  using Version = std::tuple<uint64_t, uint64_t, int64_t, int64_t, int64_t>;
  struct Known {
    Version version;
    Record record;
  };
  // By the name of the folder of each checkpoint.
  using Records = std::map<std::string, Known>;

  const Read read_;
  Mutex mu_;
  // By the folder that contains the checkpoints.
  std::map<std::string, Records> known_ ABSL_GUARDED_BY(mu_);
};

template <class Record>
std::vector<Record> RecordCache<Record>::ReadAll(const std::string& parent) {
  Records before;
  {
    const MutexLock lock(&mu_);
    before = std::exchange(known_[parent], {});
  }
  Records there;
  std::vector<Record> records;
  for (const std::string& name : ListDirectory(parent).value_or(std::vector<std::string>())) {
    const std::string dir = JoinPath(parent, name), seal = JoinPath(dir, kSealName);
    struct stat info;
    const bool named = stat(seal.c_str(), &info) == 0;
    if (!named && !PathExists(JoinPath(dir, kSealingName))) continue;
    Version version;
    if (named) {
      version = {info.st_dev, info.st_ino, info.st_size, info.st_mtim.tv_sec, info.st_mtim.tv_nsec};
      if (const auto known = before.find(name);
          known != before.end() && known->second.version == version) {
        records.push_back(known->second.record);
        there.insert(before.extract(known));
        continue;
      }
    }
    std::optional<Record> record = read_(dir);
    if (!record.has_value()) continue;
    records.push_back(*record);
    if (named) there.insert({name, {.version = version, .record = *std::move(record)}});
  }
  const MutexLock lock(&mu_);
  known_[parent] = std::move(there);
  return records;
}

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_RECORD_CACHE_H_
