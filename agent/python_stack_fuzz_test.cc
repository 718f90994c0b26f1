// Reads memory of Python processes that changes during the read, or is random: whatever is read,
// nothing crashes (memory errors show in the asan build), the work ends within its limits, and the
// result is text. MUSTER_FUZZ_CASES sets the number of cases of each recording.
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "agent/fake_memory.h"
#include "agent/memory_reader.h"
#include "agent/python_layout.h"
#include "agent/python_stack.h"
#include "base/text.h"
#include "tests/testdata/golden.h"

namespace muster::agent {
namespace {

using Random = std::mt19937_64;

int64_t Cases() {
  int64_t cases = 2'000;
  const char* const wanted = std::getenv("MUSTER_FUZZ_CASES");
  EXPECT_TRUE(wanted == nullptr || absl::SimpleAtoi(wanted, &cases)) << wanted;
  return cases;
}

// Counts the bytes that are read, and may change some of them.
class CountingMemory final : public MemoryReader {
 public:
  CountingMemory(const MemoryReader& memory, Random& random, int noise)
      : memory_(memory), random_(random), noise_(noise) {}
  bool Read(uint64_t address, void* to, size_t size) const override {
    ++reads_;
    if (!memory_.Read(address, to, size)) return false;
    bytes_ += size;
    // The value differs from a moment ago.
    if (noise_ > 0 && size > 0 && random_() % noise_ == 0) {
      static_cast<char*>(to)[random_() % size] = static_cast<char>(random_());
    }
    return true;
  }
  void Check() const {
    EXPECT_LE(bytes_, PythonStackReader::kMaxBytes + (1 << 20));
    EXPECT_LE(reads_, 200'000);
    reads_ = 0;
    bytes_ = 0;
  }

 private:
  const MemoryReader& memory_;
  Random& random_;
  const int noise_;
  mutable int64_t reads_ = 0;
  mutable uint64_t bytes_ = 0;
};

// Every address holds the same 8 bytes: all pointers point to one place.
class ConstantMemory final : public MemoryReader {
 public:
  explicit ConstantMemory(uint64_t word) : word_(word) {}
  bool Read(uint64_t, void* to, size_t size) const override {
    for (size_t i = 0; i < size; ++i) {
      static_cast<char*>(to)[i] = static_cast<char>(word_ >> (i % 8 * 8));
    }
    return true;
  }

 private:
  const uint64_t word_;
};

void ReadAll(const CountingMemory& memory, const PythonSymbols& symbols) {
  const absl::StatusOr<PythonLayout> layout = ReadPythonLayout(memory, symbols);
  if (!layout.ok()) return;
  const PythonStackReader reader(memory, *layout, symbols.runtime);
  std::vector<PythonThread> threads = reader.Threads();
  ASSERT_LE(threads.size(), size_t{PythonStackReader::kMaxThreads});
  memory.Check();
  if (threads.size() > 12) threads.resize(12);
  for (const PythonThread& thread : threads) {
    const PythonStack stack = reader.Stack(thread, 20);
    memory.Check();
    ASSERT_LE(stack.frames.size(), 20u);
    for (const PythonFrame& frame : stack.frames) {
      const std::string line = frame.ToString();
      ASSERT_LE(line.size(), 2100u);
      ASSERT_TRUE(IsValidUtf8(line));
      ASSERT_EQ(line.find('\n'), std::string::npos);
    }
  }
}

// Changes some bytes and pointers, and removes parts.
void MutateMemory(FakeMemory* memory, Random& random) {
  const auto pick = [&] {
    return std::next(memory->parts().begin(),
                     static_cast<int64_t>(random() % memory->parts().size()));
  };
  const int changes = 1 + static_cast<int>(random() % 6);
  for (int i = 0; i < changes && memory->parts().size() > 1; ++i) {
    const auto part = pick();
    std::string& bytes = part->second;
    switch (random() % 5) {
      case 0:
        bytes[random() % bytes.size()] = static_cast<char>(random());
        break;
      case 1:
        bytes.resize(1 + random() % bytes.size());
        break;
      case 2:
        memory->parts().erase(part);
        break;
      default: {
        if (bytes.size() < 8) break;
        const uint64_t values[] = {0,
                                   ~uint64_t{0},
                                   random(),
                                   random() % 4096,
                                   pick()->first,
                                   pick()->first + random() % 64,
                                   part->first};
        memcpy(bytes.data() + random() % (bytes.size() / 8) * 8, &values[random() % 7], 8);
      }
    }
  }
}

TEST(PythonStackFuzz, MutatedMemory_IsReadWithinLimits) {
  for (const std::string version : {"3.9", "3.10", "3.11", "3.12", "3.13"}) {
    SCOPED_TRACE(version);
    std::ifstream file(testing_support::TestdataPath("python_memory/" + version + ".txt"));
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    const PythonRecording recording = PythonRecording::FromText(text);
    ASSERT_FALSE(recording.memory.parts().empty());
    Random random(17);
    for (int64_t i = 0; i < Cases() && !::testing::Test::HasFailure(); ++i) {
      FakeMemory memory = recording.memory;
      MutateMemory(&memory, random);
      ReadAll(CountingMemory(memory, random, i % 3 == 0 ? 20 : 0), recording.symbols);
    }
  }
}

TEST(PythonStackFuzz, OneWordEverywhere_EndsAtTheLimits) {
  Random random(23);
  const uint64_t words[] = {0, 1, 0x20, 0x24, 0x64, 0x28, 0x1000, ~uint64_t{0}, 0x7f0000000024};
  for (int i = 0; i < 200; ++i) {
    const ConstantMemory memory(i < 9 ? words[i] : random() >> (random() % 60));
    const CountingMemory counting(memory, random, /*noise=*/0);
    for (const char* file : {"python3.9", "python3.10"}) {
      ReadAll(counting, {.runtime = 0x1000, .version = 0, .file = file});
    }
  }
}

}  // namespace
}  // namespace muster::agent
