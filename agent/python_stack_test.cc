#include "agent/python_stack.h"

#include <cstdint>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "agent/fake_memory.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/testdata/golden.h"

namespace muster::agent {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

PythonRecording Recording(const std::string& version) {
  std::ifstream file(testing_support::TestdataPath("python_memory/" + version + ".txt"));
  const std::string text((std::istreambuf_iterator<char>(file)), {});
  EXPECT_FALSE(text.empty()) << version;
  return PythonRecording::FromText(text);
}

std::string Joined(const PythonStack& stack) {
  return absl::StrJoin(stack.frames, "\n", [](std::string* out, const PythonFrame& frame) {
    absl::StrAppend(out, frame.ToString());
  });
}

// A process with one thread whose memory the test writes, with the layout of 3.11.
class PythonStackTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kRuntime = 0x10000, kVersion = 0x9000;
  static constexpr uint64_t kInterpreter = 0x20000, kThread = 0x30000, kCFrame = 0x31000;

  PythonStackTest() {
    memory_.Put(kRuntime, std::string(64, '\0'));
    memory_.PutValue<uint64_t>(kVersion, 0x030b02f0);
    layout_ = *ReadPythonLayout(memory_, {.runtime = kRuntime, .version = kVersion, .file = "p"});
    memory_.PutValue<uint64_t>(kRuntime + layout_.interpreters, kInterpreter);
    memory_.Put(kInterpreter, std::string(64, '\0'));
    memory_.PutValue<uint64_t>(kInterpreter + layout_.interpreter_threads, kThread);
    memory_.Put(kThread, std::string(256, '\0'));
    memory_.PutValue<uint64_t>(kThread + layout_.thread_interpreter, kInterpreter);
    memory_.PutValue<uint64_t>(kThread + layout_.thread_id, 77);
    memory_.PutValue<uint64_t>(kThread + layout_.thread_frame, kCFrame);
    memory_.PutValue<uint64_t>(kCFrame + layout_.cframe_frame, 0);
  }

  uint64_t Room(uint64_t bytes) {
    const uint64_t address = next_;
    next_ += (bytes + 0xfff) & ~uint64_t{0xff};
    memory_.Put(address, std::string(bytes, '\0'));
    return address;
  }
  // Writes a str with characters of `kind` bytes each.
  uint64_t Text(const std::string& bytes, uint32_t kind = 1, bool ascii = true) {
    const uint64_t data = ascii ? layout_.text_ascii : layout_.text_other;
    const uint64_t text = Room(data + bytes.size());
    memory_.PutValue<uint64_t>(text + layout_.text_length, bytes.size() / kind);
    memory_.PutValue<uint32_t>(text + layout_.text_state,
                               kind << 2 | 1u << 5 | (ascii ? 1u << 6 : 0));
    memory_.Put(text + data, bytes);
    return text;
  }
  uint64_t Code(uint64_t name, uint64_t file, const std::string& lines = "\x87") {
    const uint64_t table = Room(layout_.bytes_data + lines.size());
    memory_.PutValue<uint64_t>(table + layout_.bytes_length, lines.size());
    memory_.Put(table + layout_.bytes_data, lines);
    const uint64_t code = Room(layout_.code_instructions + 64);
    memory_.PutValue<int32_t>(code + layout_.code_first_line, 7);
    memory_.PutValue<uint64_t>(code + layout_.code_name, name);
    memory_.PutValue<uint64_t>(code + layout_.code_filename, file);
    memory_.PutValue<uint64_t>(code + layout_.code_lines, table);
    return code;
  }
  // Writes a new innermost frame.
  uint64_t Call(uint64_t code, int64_t offset = 0) {
    const uint64_t frame = Room(layout_.frame_bytes);
    memory_.PutValue<uint64_t>(frame + layout_.frame_previous, innermost_);
    memory_.PutValue<uint64_t>(frame + layout_.frame_code, code);
    memory_.PutValue<uint64_t>(frame + layout_.frame_instruction,
                               code + layout_.code_instructions + static_cast<uint64_t>(offset));
    memory_.PutValue<uint64_t>(kCFrame + layout_.cframe_frame, frame);
    return innermost_ = frame;
  }
  PythonStack Stack(int max_frames = 64) const {
    const PythonStackReader reader(memory_, layout_, kRuntime);
    const std::vector<PythonThread> threads = reader.Threads();
    EXPECT_THAT(threads, SizeIs(1));
    return threads.empty() ? PythonStack() : reader.Stack(threads[0], max_frames);
  }

  FakeMemory memory_;
  PythonLayout layout_;
  uint64_t next_ = 0x100000;
  uint64_t innermost_ = 0;
};

TEST(PythonRecordings, EveryVersion_HasTheFramesOfTheProgram) {
  // tests/testdata/python_memory/program.py
  const auto frames = [](bool qualified) {
    const std::string stand = "stand (/srv/program.py:18)\n";
    std::string recursion = stand + "recurse (/srv/program.py:35)\n";
    for (int i = 0; i < 80; ++i) recursion += "recurse (/srv/program.py:36)\n";
    return std::vector<std::string>{
        stand + "𐐀 (/srv/𝒳/in\\x0ahere.py:4)",
        stand + "after_a_long_gap (/srv/program.py:236)",
        stand + "𐐀_long_lines (/srv/program.py:70)\n<lambda> (/srv/program.py:248)",
        stand + (qualified ? "through_c.<locals>.<lambda>" : "<lambda>") +
            " (/srv/program.py:62)\nthrough_c (/srv/program.py:62)",
        stand +
            "inner (/srv/program.py:50)\nouter (/srv/program.py:54)\n"
            "run_coroutine (/srv/program.py:58)",
        stand + "generate (/srv/program.py:41)\nconsume (/srv/program.py:45)",
        recursion + "<lambda> (/srv/program.py:244)",
        stand + (qualified ? "Träger." : "") +
            "schritt (/srv/program.py:23)\nγράμμα (/srv/program.py:28)\n"
            "γράμμα (/srv/program.py:30)\nγράμμα (/srv/program.py:30)\n"
            "<lambda> (/srv/program.py:243)",
        "<module> (/srv/program.py:258)\n<module> (<string>:1)",
    };
  };
  const struct {
    std::string file, version;
    bool qualified;
  } recordings[] = {{"3.9", "3.9", false},
                    {"3.10", "3.10", false},
                    {"3.11", "3.11.2", true},
                    {"3.12", "3.12.1", true},
                    {"3.13", "3.13.0", true}};
  for (const auto& one : recordings) {
    SCOPED_TRACE(one.file);
    const PythonRecording recording = Recording(one.file);
    const absl::StatusOr<PythonLayout> layout =
        ReadPythonLayout(recording.memory, recording.symbols);
    ASSERT_TRUE(layout.ok()) << layout.status();
    EXPECT_EQ(layout->version, one.version);
    const PythonStackReader reader(recording.memory, *layout, recording.symbols.runtime);
    std::vector<std::string> stacks;
    for (const PythonThread& thread : reader.Threads()) {
      const PythonStack stack = reader.Stack(thread, 200);
      EXPECT_EQ(stack.torn, "");
      EXPECT_EQ(stack.more_frames, 0);
      stacks.push_back(Joined(stack));
    }
    EXPECT_THAT(stacks, ::testing::UnorderedElementsAreArray(frames(one.qualified)));
  }
}

TEST_F(PythonStackTest, ThreadWithoutFrames_HasAnEmptyStack) { EXPECT_TRUE(Stack().empty()); }

TEST_F(PythonStackTest, ManyFrames_AreCounted) {
  const uint64_t code = Code(Text("f"), Text("a.py"));
  for (int i = 0; i < 100; ++i) Call(code);
  const PythonStack stack = Stack(10);
  EXPECT_THAT(stack.frames, SizeIs(10));
  EXPECT_EQ(stack.more_frames, 90);
  EXPECT_FALSE(stack.more_than_that);
  EXPECT_EQ(stack.torn, "");
}

TEST_F(PythonStackTest, RingOfFrames_EndsAtTheLimit) {
  const uint64_t frame = Call(Code(Text("f"), Text("a.py")));
  memory_.PutValue<uint64_t>(frame + layout_.frame_previous, frame);
  const PythonStack stack = Stack(10);
  EXPECT_EQ(stack.more_frames, PythonStackReader::kMaxFollowed - 10);
  EXPECT_TRUE(stack.more_than_that);
}

TEST_F(PythonStackTest, RingsOfThreadsAndInterpreters_EndAtTheirLimits) {
  memory_.PutValue<uint64_t>(kThread + layout_.thread_next, kThread);
  memory_.PutValue<uint64_t>(kInterpreter + layout_.interpreter_next, kInterpreter);
  const PythonStackReader reader(memory_, layout_, kRuntime);
  EXPECT_THAT(reader.Threads(), SizeIs(PythonStackReader::kMaxThreads));
}

TEST_F(PythonStackTest, FrameThatIsGone_ShortensTheStackAndSaysSo) {
  const uint64_t outer = Call(Code(Text("outer"), Text("a.py")));
  Call(Code(Text("inner"), Text("a.py")));
  memory_.PutValue<uint64_t>(outer + layout_.frame_code, 0x77777);
  const PythonStack stack = Stack();
  EXPECT_EQ(Joined(stack), "inner (a.py:7)");
  EXPECT_THAT(stack.torn, HasSubstr("makes no sense"));
}

TEST_F(PythonStackTest, ThreadThatHasEnded_IsNotTakenForAnother) {
  Call(Code(Text("f"), Text("a.py")));
  const PythonStackReader reader(memory_, layout_, kRuntime);
  const std::vector<PythonThread> threads = reader.Threads();
  memory_.PutValue<uint64_t>(kThread + layout_.thread_id, 78);
  const PythonStack stack = reader.Stack(threads[0], 64);
  EXPECT_TRUE(stack.frames.empty());
  EXPECT_THAT(stack.torn, HasSubstr("the state of the thread"));
}

TEST_F(PythonStackTest, InstructionOutsideOfTheCode_IsTorn) {
  Call(Code(Text("f"), Text("a.py")), -40);
  EXPECT_THAT(Stack().torn, HasSubstr("makes no sense"));
}

TEST_F(PythonStackTest, FunctionThatHasNotBegun_IsAtItsFirstLine) {
  Call(Code(Text("f"), Text("a.py")), -2);
  EXPECT_EQ(Joined(Stack()), "f (a.py:7)");
}

TEST_F(PythonStackTest, LongPath_IsShownByItsEnd) {
  Call(Code(Text("f"), Text(std::string(5000, 'd') + "/train.py")));
  const PythonStack stack = Stack();
  ASSERT_THAT(stack.frames, SizeIs(1));
  EXPECT_THAT(stack.frames[0].file, ::testing::StartsWith("...ddd"));
  EXPECT_THAT(stack.frames[0].file, ::testing::EndsWith("d/train.py"));
  EXPECT_LE(stack.frames[0].file.size(), 300u);
}

TEST_F(PythonStackTest, OddTexts_ArePrintable) {
  const std::string surrogate("\x00\xd8\x41\x00", 4), beyond("\xff\xff\xff\x7f", 4);
  Call(Code(Text(surrogate, 2, false), Text("")));
  Call(Code(Text(beyond, 4, false), Text("\x1b[31m\n#0 forged")));
  Call(Code(Text("\xe9", 1, false), Text("a.py")));
  EXPECT_EQ(Joined(Stack()),
            "é (a.py:7)\n\xEF\xBF\xBD (\\x1b[31m\\x0a#0 forged:7)\n\xEF\xBF\xBD"
            "A (:7)");
}

TEST_F(PythonStackTest, TextThatIsNone_IsTorn) {
  const uint64_t name = Text("f");
  Call(Code(name, Text("a.py")));
  memory_.PutValue<uint64_t>(name + layout_.text_length, uint64_t{1} << 40);
  EXPECT_NE(Stack().torn, "");
  memory_.PutValue<int64_t>(name + layout_.text_length, -1);
  EXPECT_NE(Stack().torn, "");
  memory_.PutValue<uint64_t>(name + layout_.text_length, 1);
  EXPECT_EQ(Stack().torn, "");
  memory_.PutValue<uint32_t>(name + layout_.text_state, 3u << 2 | 1u << 5);
  EXPECT_NE(Stack().torn, "");
}

TEST_F(PythonStackTest, TableOfLinesWithoutEnd_CostsTheLineOnly) {
  const uint64_t code = Code(Text("f"), Text("a.py"));
  uint64_t table = 0;
  ASSERT_TRUE(memory_.ReadValue(code + layout_.code_lines, &table));
  memory_.PutValue<uint64_t>(table + layout_.bytes_length, uint64_t{1} << 50);
  Call(code);
  EXPECT_EQ(Joined(Stack()), "f (a.py:?)");
}

TEST_F(PythonStackTest, FramesOfTheInterpreterItself_AreNotShown) {
  const uint64_t code = Code(Text("f"), Text("a.py"));
  Call(code);
  const uint64_t entry = Call(/*code=*/0);
  memory_.PutValue<uint8_t>(entry + layout_.frame_owner, 3);
  Call(code);
  EXPECT_EQ(Joined(Stack()), "f (a.py:7)\nf (a.py:7)");
}

}  // namespace
}  // namespace muster::agent
