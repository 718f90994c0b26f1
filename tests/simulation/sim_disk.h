#ifndef MUSTER_TESTS_SIMULATION_SIM_DISK_H_
#define MUSTER_TESTS_SIMULATION_SIM_DISK_H_

#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace muster::simulation {

// A journal device that keeps only what was synced. Records are framed as length, checksum,
// payload, so that a torn tail can be distinguished from a whole one.
class SimDisk {
 public:
  // Returns false if there is no room. A part of the record may have been written; the next Append
  // cuts it off again.
  bool Append(absl::string_view record, std::mt19937_64* random);
  // Notes that everything up to `bytes` (a former size()) is on the platter.
  void Synced(size_t bytes);
  // Returns the bytes ever appended; grows only, also when a snapshot takes the place of records.
  size_t size() const { return base_ + log_.size() - torn_; }

  // Cuts the power: of what was not synced, any beginning may have reached the platter, its last
  // bytes damaged. Returns whether anything was lost.
  bool Crash(std::mt19937_64* random);
  // Reads back the snapshot (empty: none) and the whole records after it; cuts a torn tail off, and
  // returns whether there was one.
  bool Recover(std::string* snapshot, std::vector<std::string>* records);

  // Reads what a snapshot of `revision` is built from: the snapshot, and the synced records after
  // it up to that revision. Returns false if there is a later snapshot.
  bool Read(uint64_t revision, std::string* snapshot, std::vector<std::string>* records) const;

  // Replaces all records with revisions up to `revision`, atomically.
  void PublishSnapshot(const std::string& image, uint64_t revision);
  void set_full(bool full) { full_ = full; }
  // Returns whether an Append that failed left a part of its record.
  bool torn() const { return torn_ > 0; }

 private:
  bool full_ = false;
  std::string snapshot_;
  size_t base_ = 0;  // bytes cut off before log_
  std::string log_;
  size_t synced_ = 0;  // of log_
  size_t torn_ = 0;    // at the end of log_: left by an Append that failed
};

}  // namespace muster::simulation

#endif  // MUSTER_TESTS_SIMULATION_SIM_DISK_H_
