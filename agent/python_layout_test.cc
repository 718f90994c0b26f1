#include "agent/python_layout.h"

#include <cstdint>
#include <random>
#include <string>

#include "agent/fake_memory.h"
#include "base/mutate.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kRuntime = 0x1000, kVersion = 0x8000;

// A process whose Py_Version is `version`.
absl::StatusOr<PythonLayout> LayoutOf(uint64_t version, const std::string& file = "python3") {
  FakeMemory memory;
  memory.Put(kRuntime, std::string(64, '\0'));
  memory.PutValue(kVersion, version);
  return ReadPythonLayout(memory, {.runtime = kRuntime, .version = kVersion, .file = file});
}

TEST(PythonLayout, VersionSymbol_Tells311And312) {
  EXPECT_EQ(LayoutOf(0x030b02f0)->version, "3.11.2");
  EXPECT_EQ(LayoutOf(0x030c01f0)->version, "3.12.1");
  EXPECT_NE(LayoutOf(0x030b02f0)->frame_code, LayoutOf(0x030c01f0)->frame_code);
}

TEST(PythonLayout, UnknownVersion_IsNamed) {
  const absl::Status old = LayoutOf(0x030712f0).status();
  EXPECT_EQ(old.code(), absl::StatusCode::kUnimplemented);
  EXPECT_THAT(std::string(old.message()), HasSubstr("Python 3.7.18: the layout"));
  EXPECT_EQ(LayoutOf(0x030b00b4).status().code(), absl::StatusCode::kUnimplemented);  // a beta
  FakeMemory memory;
  memory.Put(kRuntime, std::string(64, '\0'));
  const auto of_file = [&memory](const std::string& file) {
    return ReadPythonLayout(memory, {.runtime = kRuntime, .version = 0, .file = file});
  };
  EXPECT_EQ(of_file("libpython3.9.so.1.0")->version, "3.9");
  EXPECT_EQ(of_file("python3.10")->version, "3.10");
  EXPECT_THAT(std::string(of_file("python3.8").status().message()), HasSubstr("Python 3.8:"));
  EXPECT_THAT(std::string(of_file("blender").status().message()),
              HasSubstr("the version of the Python in blender cannot be determined"));
}

TEST(PythonLayout, NamesOfFiles_TellTheVersion) {
  EXPECT_EQ(PythonMinorOf("libpython3.10.so.1.0"), 10);
  EXPECT_EQ(PythonMinorOf("python3.9"), 9);
  EXPECT_EQ(PythonMinorOf("python3"), -1);
  EXPECT_EQ(PythonMinorOf("python3."), -1);
  EXPECT_EQ(PythonMinorOf("python3.123456789012345678901"), -1);
  EXPECT_EQ(PythonMinorOf(""), -1);
}

TEST(PythonLayout, MemoryThatCannotBeRead_IsSaid) {
  FakeMemory memory;
  const PythonSymbols symbols = {.runtime = kRuntime, .version = kVersion, .file = "python3.11"};
  EXPECT_EQ(ReadPythonLayout(memory, symbols).status().code(), absl::StatusCode::kDataLoss);
  memory.Put(kRuntime, std::string(8, '\0'));
  EXPECT_EQ(ReadPythonLayout(memory, symbols).status().code(), absl::StatusCode::kDataLoss);
  memory.Put(kRuntime, "xdebugpy");
  EXPECT_EQ(ReadPythonLayout(memory, symbols).status().code(), absl::StatusCode::kDataLoss);
}

TEST(PythonLayout, DebugOffsets_OfAnotherVersionOrBuild_AreNotTaken) {
  FakeMemory memory;
  const PythonSymbols symbols = {.runtime = kRuntime, .version = 0, .file = "python3"};
  memory.Put(kRuntime, "xdebugpy" + std::string(1000, '\0'));
  memory.PutValue<uint64_t>(kRuntime + 8, 0x030e00f0);
  EXPECT_THAT(std::string(ReadPythonLayout(memory, symbols).status().message()),
              HasSubstr("Python 3.14.0: the layout"));
  memory.PutValue<uint64_t>(kRuntime + 8, 0x030d00f0);
  EXPECT_EQ(ReadPythonLayout(memory, symbols).status().code(), absl::StatusCode::kDataLoss);
  memory.PutValue<uint64_t>(kRuntime + 16, 1);
  EXPECT_THAT(std::string(ReadPythonLayout(memory, symbols).status().message()),
              HasSubstr("a build without the GIL"));
}

TEST(PythonLayout, RandomDebugOffsets_GiveNothingThatReachesFar) {
  std::mt19937_64 random(11);
  for (int i = 0; i < 20'000; ++i) {
    std::string bytes = "xdebugpy";
    const uint64_t version = 0x030d00f0;
    bytes.append(reinterpret_cast<const char*>(&version), sizeof(version));
    bytes.append(8, '\0');
    for (int word = 0; word < 70; ++word) {
      const uint64_t value = random() % 8 == 0 ? random() : random() % 300;
      bytes.append(reinterpret_cast<const char*>(&value), sizeof(value));
    }
    FakeMemory memory;
    memory.Put(kRuntime, i % 2 == 0 ? bytes : Mutate(bytes, random));
    const absl::StatusOr<PythonLayout> layout =
        ReadPythonLayout(memory, {.runtime = kRuntime, .version = 0, .file = "python3"});
    if (!layout.ok()) continue;
    EXPECT_LE(layout->frame_bytes, 4096u);
    EXPECT_LE(layout->code_bytes, 4096u);
    EXPECT_LE(layout->frame_code + 8, layout->frame_bytes);
  }
}

}  // namespace
}  // namespace muster::agent
