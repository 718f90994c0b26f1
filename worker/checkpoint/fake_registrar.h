#ifndef MUSTER_WORKER_CHECKPOINT_FAKE_REGISTRAR_H_
#define MUSTER_WORKER_CHECKPOINT_FAKE_REGISTRAR_H_

#include <gtest/gtest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/file.h"
#include "base/mutex.h"
#include "worker/checkpoint/registrar.h"

namespace muster {

// A registry in memory, for tests. Methods that ranks call are thread-safe.
class FakeRegistrar : public CheckpointRegistrar {
 public:
  std::string job() const override { return job_name; }
  std::string identity() const override { return name; }
  absl::StatusOr<uint64_t> Begin(const CheckpointRegistration& registration) override {
    const MutexLock lock(&mu_);
    if (!away.ok()) return away;
    RegisteredCheckpoint record;
    record.job = job_name;
    record.id = ++last_;
    record.path = registration.path;
    record.staging = registration.staging;
    record.iteration = registration.iteration;
    record.step = registration.step;
    record.ranks = registration.ranks;
    record.plan = registration.plan;
    record.promoted = registration.promote;
    generations_[record.id] = generation;
    records[record.id] = record;
    keep_ = registration.keep;
    return record.id;
  }
  absl::Status ReportShards(uint64_t id, int rank,
                            const std::vector<ShardFileReport>& files) override {
    const MutexLock lock(&mu_);
    if (rank == failing_rank) return absl::UnavailableError("no answer");
    if (!reported_[id].insert(rank).second) return absl::OkStatus();
    for (const ShardFileReport& file : files) {
      size_t bytes = 0;
      for (const ShardSlice& slice : file.slices) {
        bytes += slice.tensor.size() + slice.dtype.size() + 8 * slice.global_shape.size();
        largest_file_report = std::max(largest_file_report, bytes);
        slices.insert(slice.tensor);
        auto& [held, all] = held_[id][slice.tensor];
        held += Elements(slice.extent);
        all = Elements(slice.global_shape);
      }
    }
    return absl::OkStatus();
  }
  absl::StatusOr<std::optional<RegisteredCheckpoint>> Seal(uint64_t id) override {
    const MutexLock lock(&mu_);
    ++seals;
    if (on_seal) on_seal(records.at(id));
    if (forgets > 0) {
      --forgets;
      reported_[id].clear();
      held_[id].clear();
    }
    RegisteredCheckpoint& record = records.at(id);
    if (static_cast<int>(reported_[id].size()) < record.ranks) return std::nullopt;
    if (!refusal.ok()) return refusal;
    // Like the coordinator (coverage.h), but by the sizes of slices alone.
    for (const auto& [tensor, sizes] : held_[id]) {
      if (sizes.first == sizes.second) continue;
      return absl::InvalidArgumentError(absl::StrCat("tensor ", tensor, ": the files have ",
                                                     sizes.first, " of its ", sizes.second,
                                                     " elements"));
    }
    record.state = RegisteredCheckpoint::State::kSealed;
    record.sha256 = std::string(60, 'a') + absl::StrCat(1000 + id);
    return record;
  }
  absl::StatusOr<std::vector<RegisteredCheckpoint>> Publish(uint64_t id,
                                                            const SaveTimes& times) override {
    const MutexLock lock(&mu_);
    published_times = times;
    RegisteredCheckpoint& record = records.at(id);
    EXPECT_TRUE(PathExists(record.path)) << "published before it has its name";
    record.state = RegisteredCheckpoint::State::kPublished;
    record.published = true;
    std::vector<RegisteredCheckpoint> go;
    for (const uint64_t other : superfluous) {
      records.at(other).state = RegisteredCheckpoint::State::kDeleting;
    }
    superfluous.clear();
    for (auto& [other, old] : records) {
      // Like the coordinator, lets go of what a generation that has ended sealed and did not
      // publish.
      if (old.state == RegisteredCheckpoint::State::kSealed && other < id && !old.pinned &&
          generations_[other] < generation && ParentPath(old.path) == ParentPath(record.path)) {
        old.state = RegisteredCheckpoint::State::kDeleting;
      }
      // Listed until Deleted() reports that it is gone.
      if (old.state == RegisteredCheckpoint::State::kDeleting) go.push_back(old);
    }
    int newer = 0;
    for (auto it = records.rbegin(); it != records.rend(); ++it) {
      if (it->second.state != RegisteredCheckpoint::State::kPublished || it->second.pinned ||
          keep_ == 0)
        continue;
      if (++newer <= keep_) continue;
      it->second.state = RegisteredCheckpoint::State::kDeleting;
      go.push_back(it->second);
    }
    return go;
  }
  void CountUnrecorded(uint64_t bytes, const SaveTimes&) override {
    const MutexLock lock(&mu_);
    unrecorded.push_back(bytes);
  }
  absl::Status Deleted(const std::vector<uint64_t>& ids) override {
    const MutexLock lock(&mu_);
    for (const uint64_t id : ids) records.erase(id);
    return absl::OkStatus();
  }
  void Abort(uint64_t id, const std::string& reason) override {
    const MutexLock lock(&mu_);
    aborts.push_back(reason);
    records.erase(id);
  }
  void Verified(const RegisteredCheckpoint& checkpoint, absl::string_view damage,
                bool contents) override {
    const MutexLock lock(&mu_);
    verdicts.emplace_back(checkpoint.id, damage);
    records.at(checkpoint.id).damage = std::string(damage);
    records.at(checkpoint.id).damage_in_contents = contents && !damage.empty();
    if (on_verified) on_verified();
  }
  absl::Status Pin(uint64_t id) override {
    const MutexLock lock(&mu_);
    if (!pin_error.ok()) return pin_error;
    records.at(id).pinned = true;
    return absl::OkStatus();
  }
  absl::Status Unpin(uint64_t) override { return absl::OkStatus(); }
  absl::StatusOr<std::vector<RegisteredCheckpoint>> List() override {
    const MutexLock lock(&mu_);
    if (!away.ok()) return away;
    std::vector<RegisteredCheckpoint> all;
    for (const auto& [id, record] : records) all.push_back(record);
    return all;
  }

  void set_keep(int keep) {
    const MutexLock lock(&mu_);
    keep_ = keep;
  }

  std::string job_name = "j", name = "registry";
  absl::Status away, refusal, pin_error;
  int forgets = 0, failing_rank = -1, seals = 0;
  int generation = 1;  // generation of the job's processes
  std::map<uint64_t, RegisteredCheckpoint> records;
  std::set<std::string> slices;
  size_t largest_file_report = 0;  // approximate, in bytes
  std::vector<std::string> aborts;
  SaveTimes published_times;
  std::vector<uint64_t> unrecorded;  // bytes of each
  std::vector<std::pair<uint64_t, std::string>> verdicts;
  std::function<void()> on_verified;
  // called before the checkpoint is sealed
  std::function<void(const RegisteredCheckpoint&)> on_seal;
  std::set<uint64_t> superfluous;  // deleted by the next publication, whatever they are

 private:
  static int64_t Elements(const std::vector<int64_t>& sizes) {
    int64_t elements = 1;
    for (const int64_t size : sizes) elements *= size;
    return elements;
  }

  Mutex mu_;
  uint64_t last_ = 0;
  int keep_ = 0;
  std::map<uint64_t, int> generations_;  // of the checkpoints that were begun
  std::map<uint64_t, std::set<int>> reported_;
  // For each checkpoint, by tensor: the elements in the files, and those of the tensor.
  std::map<uint64_t, std::map<std::string, std::pair<int64_t, int64_t>>> held_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_FAKE_REGISTRAR_H_
