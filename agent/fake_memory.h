#ifndef MUSTER_AGENT_FAKE_MEMORY_H_
#define MUSTER_AGENT_FAKE_MEMORY_H_

#include <cstdint>
#include <map>
#include <string>

#include "absl/strings/string_view.h"
#include "agent/memory_reader.h"
#include "agent/python_layout.h"

namespace muster::agent {

// Memory that consists of a few known parts, for tests. Also a recording of the parts of a process
// that were read.
class FakeMemory final : public MemoryReader {
 public:
  // Adds a part. Parts that touch or overlap become one; where they overlap, the new one counts.
  void Put(uint64_t address, absl::string_view bytes);
  template <typename T>
  void PutValue(uint64_t address, T value) {
    Put(address, {reinterpret_cast<const char*>(&value), sizeof(value)});
  }
  bool Read(uint64_t address, void* to, size_t size) const override;

  const std::map<uint64_t, std::string>& parts() const { return parts_; }
  std::map<uint64_t, std::string>& parts() { return parts_; }

 private:
  std::map<uint64_t, std::string> parts_;  // by address; with gaps between them
};

// Reads through `memory` and records what was read. Borrows both.
class RecordingMemory final : public MemoryReader {
 public:
  RecordingMemory(const MemoryReader& memory, FakeMemory* record)
      : memory_(memory), record_(record) {}
  bool Read(uint64_t address, void* to, size_t size) const override;

 private:
  const MemoryReader& memory_;
  FakeMemory* const record_;
};

// The content of a file with a recording: the symbols, and then each part, as "ADDRESS BYTES" in
// hexadecimal.
struct PythonRecording {
  PythonSymbols symbols;
  FakeMemory memory;

  std::string ToText() const;
  // Ends the process at an invalid line.
  static PythonRecording FromText(absl::string_view text);
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_FAKE_MEMORY_H_
