#include "agent/fake_memory.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/log.h"

namespace muster::agent {

void FakeMemory::Put(uint64_t address, absl::string_view bytes) {
  if (bytes.empty()) return;
  uint64_t begin = address;
  std::string whole(bytes);
  // Finds the last part that begins before this one, and all that begin within it or at its end.
  auto it = parts_.upper_bound(address);
  if (it != parts_.begin() && std::prev(it)->first + std::prev(it)->second.size() >= address) --it;
  while (it != parts_.end() && it->first <= begin + whole.size()) {
    const uint64_t end = std::max(begin + whole.size(), it->first + it->second.size());
    const uint64_t first = std::min(begin, it->first);
    std::string merged(end - first, '\0');
    merged.replace(it->first - first, it->second.size(), it->second);
    merged.replace(begin - first, whole.size(), whole);
    begin = first;
    whole = std::move(merged);
    it = parts_.erase(it);
  }
  parts_[begin] = std::move(whole);
}

bool FakeMemory::Read(uint64_t address, void* to, size_t size) const {
  const auto after = parts_.upper_bound(address);
  if (after == parts_.begin()) return false;
  const auto& [begin, bytes] = *std::prev(after);
  const uint64_t offset = address - begin;
  if (offset > bytes.size() || size > bytes.size() - offset) return false;
  if (size > 0) memcpy(to, bytes.data() + offset, size);
  return true;
}

bool RecordingMemory::Read(uint64_t address, void* to, size_t size) const {
  if (!memory_.Read(address, to, size)) return false;
  record_->Put(address, {static_cast<const char*>(to), size});
  return true;
}

std::string PythonRecording::ToText() const {
  std::string text = absl::StrCat("file ", symbols.file, "\nruntime ", absl::Hex(symbols.runtime),
                                  "\nversion ", absl::Hex(symbols.version), "\n");
  for (const auto& [address, bytes] : memory.parts()) {
    absl::StrAppend(&text, absl::Hex(address), " ", absl::BytesToHexString(bytes), "\n");
  }
  return text;
}

PythonRecording PythonRecording::FromText(absl::string_view text) {
  PythonRecording recording;
  for (const absl::string_view line : absl::StrSplit(text, '\n', absl::SkipEmpty())) {
    const std::vector<absl::string_view> words = absl::StrSplit(line, ' ');
    MUSTER_CHECK(words.size() == 2) << line;
    if (words[0] == "file") {
      recording.symbols.file = std::string(words[1]);
    } else if (words[0] == "runtime") {
      MUSTER_CHECK(absl::SimpleHexAtoi(words[1], &recording.symbols.runtime)) << line;
    } else if (words[0] == "version") {
      MUSTER_CHECK(absl::SimpleHexAtoi(words[1], &recording.symbols.version)) << line;
    } else {
      uint64_t address = 0;
      MUSTER_CHECK(absl::SimpleHexAtoi(words[0], &address)) << line;
      recording.memory.Put(address, absl::HexStringToBytes(words[1]));
    }
  }
  return recording;
}

}  // namespace muster::agent
