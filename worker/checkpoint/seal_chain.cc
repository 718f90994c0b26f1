#include "worker/checkpoint/seal_chain.h"

#include <sys/stat.h>

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/strings/string_view.h"
#include "base/file.h"
#include "base/mutex.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/seal.h"
#include "worker/checkpoint/sealing.h"

namespace muster {
namespace {

// A file as it was when it was read: device, inode, size, and when it was changed.
using Version = std::tuple<uint64_t, uint64_t, int64_t, int64_t, int64_t>;

struct Known {
  Version version;
  RegisteredCheckpoint record;
};
// By the name of the folder of each checkpoint.
using Records = std::map<std::string, Known>;

Mutex mu;

// What this process has read, by the folder in which checkpoints are.
std::map<std::string, Records>& Read() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu) {
  static auto* const read = new std::map<std::string, Records>();
  return *read;
}

}  // namespace

ChainEnd EndOfChain(const std::vector<RegisteredCheckpoint>& records, absl::Time now) {
  ChainEnd end;
  if (records.empty()) return end;
  absl::flat_hash_map<absl::string_view, const RegisteredCheckpoint*> after;
  for (const RegisteredCheckpoint& record : records) {
    end.highest_id = std::max(end.highest_id, record.id);
    if (!record.previous_sha256.empty()) after.emplace(record.previous_sha256, &record);
  }
  const auto follow = [&](const RegisteredCheckpoint* record) {
    // Not for ever where somebody has made them a circle.
    for (size_t i = 0; i < records.size(); ++i) {
      const auto next = after.find(record->sha256);
      if (next == after.end()) break;
      record = next->second;
    }
    return record;
  };
  const auto now_us = static_cast<uint64_t>(std::max<int64_t>(absl::ToUnixMicros(now), 0));
  const auto age = [&](const RegisteredCheckpoint& record) {
    return std::make_pair(record.created_us <= now_us, record.created_us);
  };
  const RegisteredCheckpoint* last =
      follow(&*std::max_element(records.begin(), records.end(),
                                [&](const auto& a, const auto& b) { return age(a) < age(b); }));
  // Those of a coordinator have its revisions, and the next coordinator may begin lower.
  if (last->job.empty()) {
    for (const RegisteredCheckpoint& record : records) {
      if (record.job.empty() && record.id > last->id) last = &record;
    }
    last = follow(last);
  }
  end.last = *last;
  return end;
}

ChainEnd ReadChainEnd(const std::string& parent, absl::Time now) {
  Records before;
  {
    const MutexLock lock(&mu);
    before = std::exchange(Read()[parent], {});
  }
  Records there;
  std::vector<RegisteredCheckpoint> records;
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
    const absl::StatusOr<RegisteredCheckpoint> record = ReadSeal(dir);
    if (!record.ok()) continue;
    records.push_back(*record);
    if (named) there[name] = {.version = version, .record = *record};
  }
  {
    const MutexLock lock(&mu);
    Read()[parent] = std::move(there);
  }
  return EndOfChain(records, now);
}

}  // namespace muster
