// Runs the reader of docs/checkpoint_format.md as it stands there.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <string>

#include "ATen/Functions.h"
#include "base/file.h"
#include "tests/support/command.h"
#include "worker/checkpoint/state.h"
#include "worker/collective/local_comm.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Json = nlohmann::json;
using testing_support::CommandResult;
using testing_support::RunCommand;

// Returns what stands between ```python and ``` in the document.
std::string ReaderInTheDocument() {
  const auto text = ReadFile("docs/checkpoint_format.md");
  EXPECT_TRUE(text.ok()) << text.status();
  const std::string begin = "```python\n", end = "```\n";
  const size_t from = text->find(begin);
  EXPECT_NE(from, std::string::npos);
  const size_t to = text->find(end, from + begin.size());
  EXPECT_NE(to, std::string::npos);
  return text->substr(from + begin.size(), to - from - begin.size());
}

class PythonReader : public testing::Test {
 protected:
  void SetUp() override {
    root_ = testing_support::MakeTestDir("python_reader");
    dir_ = root_ + "/ckpt";
    ASSERT_TRUE(WriteFileAtomically(root_ + "/reader.py", ReaderInTheDocument()).ok());
    LocalComm comm;
    const absl::Status saved =
        SaveCheckpoint(comm, dir_, {.step = 40, .epoch = 2}, [](StateWriter& writer) {
          absl::Status status = writer.WriteModel(
              ModelFileName(0), {{"w", at::arange(6, at::kFloat).view({2, 3}).div(4)},
                                 {"half", at::ones({2}, at::kBFloat16)},
                                 {"n", at::full({}, -7, at::kLong)},
                                 {"none", at::ones({0, 3})}});
          StateDict optimizer, scheduler;
          optimizer.SetTensor("m", at::ones({3}, at::kDouble));
          optimizer.SetInt("steps", 3);
          status.Update(writer.Write(OptimizerFileName(0), optimizer));
          scheduler.SetDouble("lr", 0.5);
          status.Update(writer.Write(SchedulerFileName(0), scheduler));
          return status;
        });
    ASSERT_TRUE(saved.ok()) << saved;
  }

  CommandResult Read() {
    return RunCommand("python3 -B " + root_ + "/reader.py " + dir_ + " 2>&1");
  }
  std::string Path(const std::string& name) const { return dir_ + "/" + name; }

  std::string root_, dir_;
};

TEST_F(PythonReader, Checkpoint_IsReadWithEveryValue) {
  const CommandResult result = Read();
  ASSERT_EQ(result.exit_code, 0) << result.output;
  const Json expected = {
      {"step", 40},
      {"epoch", 2},
      {"files",
       {{"model.safetensors",
         {{"scalars", Json::object()},
          {"tensors",
           {{"w", {"F32", {2, 3}, {0.0, 0.25, 0.5, 0.75, 1.0, 1.25}}},
            {"half", {"BF16", {2}, "803f803f"}},
            {"n", {"I64", Json::array(), Json::array({-7})}},
            {"none", {"F32", {0, 3}, Json::array()}}}}}},
        {"optimizer.safetensors",
         {{"scalars", {{"steps", 3}}}, {"tensors", {{"m", {"F64", {3}, {1.0, 1.0, 1.0}}}}}}},
        {"scheduler.json", {{"scalars", {{"lr", 0.5}}}, {"tensors", Json::object()}}}}}};
  EXPECT_EQ(Json::parse(result.output), expected) << result.output;
}

TEST_F(PythonReader, WhatIsMissingOrCutOff_IsNamed) {
  const std::string bytes = *ReadFile(Path("model.safetensors"));
  ASSERT_TRUE(WriteFileAtomically(Path("model.safetensors"), bytes + "x").ok());
  CommandResult result = Read();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, AllOf(HasSubstr("damaged: " + Path("model.safetensors") + " has "),
                                   HasSubstr("bytes, not")));
  ASSERT_TRUE(RemoveTree(Path("model.safetensors")).ok());
  result = Read();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr(Path("model.safetensors") + " is missing"));
}

TEST_F(PythonReader, NewerVersion_IsRefused) {
  Json manifest = Json::parse(*ReadFile(Path("manifest.json")));
  manifest["version"] = 2;
  ASSERT_TRUE(WriteFileAtomically(Path("manifest.json"), manifest.dump()).ok());
  const CommandResult result = Read();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.output, HasSubstr("version 2 is newer than this reader"));
}

}  // namespace
}  // namespace muster
