#include "tests/simulation/sim_disk.h"

#include <xxhash.h>

#include <algorithm>
#include <cstring>

#include "proto/muster/v1/journal.pb.h"

namespace muster::simulation {
namespace {

constexpr size_t kHeader = 8;

std::string Frame(absl::string_view record) {
  const uint32_t size = static_cast<uint32_t>(record.size());
  const uint32_t check = XXH32(record.data(), record.size(), size);
  std::string frame(kHeader, '\0');
  std::memcpy(&frame[0], &size, 4);
  std::memcpy(&frame[4], &check, 4);
  frame.append(record.data(), record.size());
  return frame;
}

// Reads the record at `at` of `log`, and where the next one begins. Returns false if there is no
// whole one.
bool ReadFrame(const std::string& log, size_t at, std::string* record, size_t* next) {
  if (log.size() - at < kHeader) return false;
  uint32_t size = 0;
  uint32_t check = 0;
  std::memcpy(&size, &log[at], 4);
  std::memcpy(&check, &log[at + 4], 4);
  if (log.size() - at - kHeader < size) return false;
  if (XXH32(&log[at + kHeader], size, size) != check) return false;
  *record = log.substr(at + kHeader, size);
  *next = at + kHeader + size;
  return true;
}

}  // namespace

bool SimDisk::Append(absl::string_view record, std::mt19937_64* random) {
  log_.resize(log_.size() - torn_);
  torn_ = 0;
  const std::string frame = Frame(record);
  if (full_) {
    torn_ = (*random)() % frame.size();
    log_.append(frame, 0, torn_);
    return false;
  }
  log_ += frame;
  return true;
}

void SimDisk::Synced(size_t bytes) {
  synced_ = std::max(synced_, std::min(bytes - base_, log_.size()));
}

bool SimDisk::Crash(std::mt19937_64* random) {
  const size_t unsynced = log_.size() - synced_;
  const size_t kept = (*random)() % 3 == 0 ? 0 : (*random)() % (unsynced + 1);
  log_.resize(synced_ + kept);
  torn_ = 0;
  for (size_t i = 0; i < std::min<size_t>(kept, 4) && (*random)() % 2 == 0; ++i) {
    log_[log_.size() - 1 - i] ^= static_cast<char>((*random)());
  }
  return kept < unsynced;
}

bool SimDisk::Recover(std::string* snapshot, std::vector<std::string>* records) {
  *snapshot = snapshot_;
  uint64_t revision = 0;
  if (!snapshot_.empty()) {
    v1::CoordinatorSnapshot parsed;
    parsed.ParseFromString(snapshot_);
    revision = parsed.revision();
  }
  size_t at = 0;
  std::string record;
  for (size_t next = 0; ReadFrame(log_, at, &record, &next); at = next) {
    v1::JournalRecord parsed;
    parsed.ParseFromString(record);
    if (parsed.revision() > revision) records->push_back(record);
  }
  const bool torn = at < log_.size();
  log_.resize(at);
  // Recovery syncs what it found before it builds on it.
  synced_ = at;
  torn_ = 0;
  return torn;
}

bool SimDisk::Read(uint64_t revision, std::string* snapshot,
                   std::vector<std::string>* records) const {
  *snapshot = snapshot_;
  uint64_t after = 0;
  if (!snapshot_.empty()) {
    v1::CoordinatorSnapshot parsed;
    parsed.ParseFromString(snapshot_);
    after = parsed.revision();
  }
  if (after > revision) return false;
  size_t at = 0;
  std::string record;
  for (size_t next = 0; at < synced_ && ReadFrame(log_, at, &record, &next); at = next) {
    v1::JournalRecord parsed;
    parsed.ParseFromString(record);
    if (parsed.revision() > revision) break;
    if (parsed.revision() > after) records->push_back(record);
  }
  return true;
}

void SimDisk::PublishSnapshot(const std::string& image, uint64_t revision) {
  snapshot_ = image;
  size_t at = 0;
  std::string record;
  for (size_t next = 0; at < synced_ && ReadFrame(log_, at, &record, &next); at = next) {
    v1::JournalRecord parsed;
    parsed.ParseFromString(record);
    if (parsed.revision() > revision) break;
  }
  log_.erase(0, at);
  base_ += at;
  synced_ -= at;
}

}  // namespace muster::simulation
