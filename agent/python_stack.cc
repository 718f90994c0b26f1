#include "agent/python_stack.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "agent/python_lines.h"
#include "base/text.h"

namespace muster::agent {
namespace {

// PyASCIIObject.state in 3.9 to 3.13.
constexpr uint32_t kKindShift = 2, kKindMask = 7, kCompact = 1 << 5, kAscii = 1 << 6;
// FRAME_OWNED_BY_CSTACK, from 3.12 on: the entry from C into the interpreter.
constexpr uint8_t kOwnedByC = 3;
// No function is longer.
constexpr int64_t kMaxInstructions = 256 << 20;

// Appends `c`, or U+FFFD for what is no character: the memory of another process may hold anything.
void AppendCharacter(std::string& text, uint32_t c) {
  AppendUtf8(text, c > 0x10ffff || (c >= 0xd800 && c < 0xe000) ? char32_t{0xfffd} : char32_t{c});
}

template <typename T>
T At(absl::string_view bytes, uint64_t offset) {
  T value = 0;
  if (offset + sizeof(T) <= bytes.size()) memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

}  // namespace

std::string PythonFrame::ToString() const {
  return absl::StrCat(function, " (", file, ":", line > 0 ? absl::StrCat(line) : "?", ")");
}

// Reads one stack.
class PythonStackReader::Walk {
 public:
  explicit Walk(const PythonStackReader& reader)
      : memory_(reader.memory_), layout_(reader.layout_) {}

  // Returns false if the code of the current frame makes no sense.
  bool Describe(absl::string_view frame_bytes, PythonFrame* frame) {
    const uint64_t address = At<uint64_t>(frame_bytes, layout_.frame_code);
    auto it = codes_.find(address);
    if (it == codes_.end()) {
      Code code;
      if (!ReadCode(address, &code)) return false;
      it = codes_.emplace(address, std::move(code)).first;
    }
    const Code& code = it->second;
    int64_t offset;
    if (layout_.instruction_bytes > 0) {
      offset =
          int64_t{At<int32_t>(frame_bytes, layout_.frame_instruction)} * layout_.instruction_bytes;
    } else {
      offset = static_cast<int64_t>(At<uint64_t>(frame_bytes, layout_.frame_instruction) -
                                    (address + layout_.code_instructions));
    }
    // A frame that has not begun is one instruction before the first one.
    if (offset < -2 || offset > kMaxInstructions) return false;
    frame->function = code.name;
    frame->file = code.file;
    frame->line =
        code.has_lines ? PythonLine(layout_.lines, code.lines, code.first_line, offset) : 0;
    return true;
  }

  bool Read(uint64_t address, std::string* bytes, uint64_t size) {
    if (size > kMaxBytes - bytes_read_) return false;
    bytes->resize(size);
    if (size == 0) return true;
    if (!memory_.Read(address, bytes->data(), size)) return false;
    bytes_read_ += size;
    return true;
  }

 private:
  struct Code {
    std::string name, file, lines;
    bool has_lines = false;
    int64_t first_line = 0;
  };

  bool ReadCode(uint64_t address, Code* code) {
    std::string bytes;
    if (!Read(address, &bytes, layout_.code_bytes)) return false;
    code->first_line = At<int32_t>(bytes, layout_.code_first_line);
    if (!ReadText(At<uint64_t>(bytes, layout_.code_name), &code->name) ||
        !ReadText(At<uint64_t>(bytes, layout_.code_filename), &code->file)) {
      return false;
    }
    const uint64_t table = At<uint64_t>(bytes, layout_.code_lines);
    int64_t size = 0;
    if (!memory_.ReadValue(table + layout_.bytes_length, &size) || size < 0) return false;
    if (static_cast<uint64_t>(size) > kMaxTableBytes) return true;
    code->has_lines = Read(table + layout_.bytes_data, &code->lines, static_cast<uint64_t>(size));
    return code->has_lines;
  }

  // Reads a str as printable text. Of a long one keeps the end, which says more about a path.
  bool ReadText(uint64_t address, std::string* text) {
    int64_t length = 0;
    uint32_t state = 0;
    if (!memory_.ReadValue(address + layout_.text_length, &length) ||
        !memory_.ReadValue(address + layout_.text_state, &state)) {
      return false;
    }
    const uint32_t kind = state >> kKindShift & kKindMask;
    if ((kind != 1 && kind != 2 && kind != 4) || (state & kCompact) == 0) return false;
    if (length < 0 || length > int64_t{1} << 32) return false;
    const bool is_ascii = (state & kAscii) != 0;
    if (is_ascii && kind != 1) return false;
    const int64_t shown = std::min<int64_t>(length, kMaxTextBytes / kind);
    std::string bytes;
    if (!Read(address + (is_ascii ? layout_.text_ascii : layout_.text_other) +
                  static_cast<uint64_t>(length - shown) * kind,
              &bytes, static_cast<uint64_t>(shown) * kind)) {
      return false;
    }
    std::string plain = shown < length ? "..." : "";
    for (int64_t i = 0; i < shown; ++i) {
      const uint64_t at = static_cast<uint64_t>(i) * kind;
      AppendCharacter(plain, kind == 1   ? At<uint8_t>(bytes, at)
                             : kind == 2 ? At<uint16_t>(bytes, at)
                                         : At<uint32_t>(bytes, at));
    }
    *text = Printable(plain, /*max_bytes=*/4 * kMaxTextBytes);
    return true;
  }

  const MemoryReader& memory_;
  const PythonLayout& layout_;
  std::map<uint64_t, Code> codes_;  // a recursive function is read once
  uint64_t bytes_read_ = 0;
};

std::vector<PythonThread> PythonStackReader::Threads() const {
  std::vector<PythonThread> threads;
  uint64_t interpreter = 0;
  if (!memory_.ReadValue(runtime_ + layout_.interpreters, &interpreter)) return threads;
  int followed = 0;  // in all interpreters: a list may have become a ring
  for (int i = 0; i < kMaxInterpreters && interpreter != 0; ++i) {
    uint64_t state = 0;
    if (!memory_.ReadValue(interpreter + layout_.interpreter_threads, &state)) break;
    for (; state != 0 && followed < kMaxThreads; ++followed) {
      PythonThread thread = {.state = state};
      uint64_t back = 0;
      if (!memory_.ReadValue(state + layout_.thread_interpreter, &back) || back != interpreter ||
          !memory_.ReadValue(state + layout_.thread_id, &thread.thread_id) ||
          (layout_.thread_native_id != 0 &&
           !memory_.ReadValue(state + layout_.thread_native_id, &thread.native_id)) ||
          !memory_.ReadValue(state + layout_.thread_next, &state)) {
        break;
      }
      threads.push_back(thread);
    }
    if (!memory_.ReadValue(interpreter + layout_.interpreter_next, &interpreter)) break;
  }
  return threads;
}

PythonStack PythonStackReader::Stack(const PythonThread& thread, int max_frames) const {
  PythonStack stack;
  const auto torn = [&stack](absl::string_view what) {
    stack.torn = absl::StrCat(what, " makes no sense: it changed while it was read?");
    return stack;
  };
  // The thread may have ended since, and its memory may belong to another one.
  uint64_t id = 0;
  if (!memory_.ReadValue(thread.state + layout_.thread_id, &id) || id != thread.thread_id) {
    return torn("the state of the thread");
  }
  uint64_t address = 0;
  if (!memory_.ReadValue(thread.state + layout_.thread_frame, &address)) {
    return torn("the state of the thread");
  }
  if (layout_.has_cframe && address != 0 &&
      !memory_.ReadValue(address + layout_.cframe_frame, &address)) {
    return torn("the state of the thread");
  }
  Walk walk(*this);
  std::string bytes;
  for (int followed = 0; address != 0; ++followed) {
    if (followed == kMaxFollowed) {
      stack.more_than_that = true;
      return stack;
    }
    if (!walk.Read(address, &bytes, layout_.frame_bytes)) return torn("the next frame");
    address = At<uint64_t>(bytes, layout_.frame_previous);
    if (layout_.frame_owner != 0 && At<uint8_t>(bytes, layout_.frame_owner) == kOwnedByC) continue;
    if (static_cast<int>(stack.frames.size()) >= max_frames) {
      ++stack.more_frames;
      continue;
    }
    PythonFrame frame;
    if (!walk.Describe(bytes, &frame)) return torn("the next frame");
    stack.frames.push_back(std::move(frame));
  }
  return stack;
}

}  // namespace muster::agent
