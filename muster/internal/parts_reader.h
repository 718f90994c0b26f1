#ifndef MUSTER_INTERNAL_PARTS_READER_H_
#define MUSTER_INTERNAL_PARTS_READER_H_

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "muster/internal/full_state.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/state.h"
#include "worker/collective/comm.h"

namespace muster::internal {

// Reads those files of a checkpoint of which each rank needs a part, several at a time.
class PartsReader {
 public:
  // (collective, if a model is sharded) `comm` and `reader` are borrowed.
  PartsReader(Comm& comm, StateReader& reader, const Models& models);

  // The bytes of all files so far, and those that this rank's host has read and received from other
  // nodes.
  uint64_t bytes() const { return bytes_; }
  uint64_t bytes_read() const { return bytes_read_; }
  uint64_t bytes_received() const { return bytes_received_; }

  // (collective) `ranges(header)`: the bytes that this rank needs of a file; `take(name)` reads it.
  // An error of this rank goes to `mine`, after which it takes nothing more; throws the errors of
  // all ranks.
  void Read(const std::vector<std::string>& names,
            const std::function<std::vector<FileRange>(const SafetensorsHeader&)>& ranges,
            const std::function<void(const std::string&)>& take, absl::Status* mine);

 private:
  bool IsReadWhole(const std::string& name) const;
  // Returns the header of a file on the disk, from the page cache. A header that cannot be parsed
  // counts as damage only if the file's digests are wrong.
  SafetensorsHeader HeaderOf(const std::string& name) const;
  // Throws unless the header that was read with the blocks, and verified, asks for the bytes that
  // were read.
  void CheckHeader(
      const std::string& name, const std::vector<FileRange>& wanted,
      const std::function<std::vector<FileRange>(const SafetensorsHeader&)>& ranges) const;

  Comm& comm_;
  StateReader& reader_;
  uint64_t hosts_of_copy_ = 1;  // among which a file is divided
  uint64_t bytes_ = 0, bytes_read_ = 0, bytes_received_ = 0;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_PARTS_READER_H_
