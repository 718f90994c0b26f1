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
  // False: there is no room. A part of the record may have been written; it is cut off again by the
  // next Append.
  bool Append(absl::string_view record, std::mt19937_64* random);
  // Everything up to `bytes` (a former size()) is on the platter.
  void Synced(size_t bytes);
  // Bytes ever appended; grows only, also when a snapshot takes the place of records.
  size_t size() const { return base_ + log_.size() - torn_; }

  // Power is lost: of what was not synced, any beginning may have reached the platter, its last
  // bytes damaged. Whether anything was lost.
  bool Crash(std::mt19937_64* random);
  // Reads back the snapshot (empty: none) and the whole records after it; cuts a torn tail off, and
  // says whether there was one.
  bool Recover(std::string* snapshot, std::vector<std::string>* records);

  // What a snapshot of `revision` is built of: the snapshot, and the synced records after it up to
  // that revision. False: there is a later snapshot.
  bool Read(uint64_t revision, std::string* snapshot, std::vector<std::string>* records) const;

  // Takes the place of all records with revisions up to `revision`, atomically.
  void PublishSnapshot(const std::string& image, uint64_t revision);
  void set_full(bool full) { full_ = full; }
  // An Append that failed left a part of its record.
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
