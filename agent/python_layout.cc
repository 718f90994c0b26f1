#include "agent/python_layout.h"

#include <algorithm>
#include <cstring>
#include <initializer_list>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace muster::agent {
namespace {

constexpr char kCookie[] = "xdebugpy";
constexpr uint64_t kCookieBytes = sizeof(kCookie) - 1;
constexpr uint64_t kReleaseFinal = 0xf;

// The layouts below are for x86-64 and other 64-bit Linux; they stay the same within a minor
// version. From 3.13 on the process itself contains its layout.
PythonLayout Layout39() {
  return {.version = "3.9",
          .lines = PythonLayout::Lines::kDeltas,
          .interpreters = 32,
          .interpreter_next = 0,
          .interpreter_threads = 8,
          .thread_next = 8,
          .thread_interpreter = 16,
          .thread_id = 176,
          .thread_native_id = 0,
          .thread_frame = 24,
          .has_cframe = false,
          .cframe_frame = 0,
          .frame_previous = 24,
          .frame_code = 32,
          .frame_instruction = 104,
          .instruction_bytes = 1,
          .frame_owner = 0,
          .frame_bytes = 108,
          .code_filename = 104,
          .code_name = 112,
          .code_lines = 120,
          .code_first_line = 40,
          .code_instructions = 0,
          .code_bytes = 128,
          .bytes_length = 16,
          .bytes_data = 32,
          .text_length = 16,
          .text_state = 32,
          .text_ascii = 48,
          .text_other = 72};
}

PythonLayout Layout310() {
  PythonLayout layout = Layout39();
  layout.version = "3.10";
  layout.lines = PythonLayout::Lines::kRanges;
  layout.frame_instruction = 96;
  layout.instruction_bytes = 2;
  layout.frame_bytes = 100;
  return layout;
}

PythonLayout Layout311() {
  PythonLayout layout = Layout39();
  layout.version = "3.11";
  layout.lines = PythonLayout::Lines::kLocations;
  layout.interpreters = 40;
  layout.interpreter_threads = 16;
  layout.thread_id = 152;
  layout.thread_native_id = 160;
  layout.thread_frame = 56;
  layout.has_cframe = true;
  layout.cframe_frame = 8;
  layout.frame_previous = 48;
  layout.frame_code = 32;
  layout.frame_instruction = 56;
  layout.instruction_bytes = 0;
  layout.frame_owner = 69;
  layout.frame_bytes = 70;
  layout.code_filename = 112;
  layout.code_name = 128;
  layout.code_lines = 136;
  layout.code_first_line = 72;
  layout.code_instructions = 184;
  layout.code_bytes = 144;
  return layout;
}

PythonLayout Layout312() {
  PythonLayout layout = Layout311();
  layout.version = "3.12";
  layout.interpreter_threads = 72;
  layout.thread_id = 136;
  layout.thread_native_id = 144;
  layout.cframe_frame = 0;
  layout.frame_previous = 8;
  layout.frame_code = 0;
  layout.frame_owner = 70;
  layout.frame_bytes = 71;
  layout.code_first_line = 68;
  layout.code_instructions = 192;
  layout.text_ascii = 40;
  layout.text_other = 56;
  return layout;
}

std::string VersionName(uint64_t version) {
  return absl::StrCat(version >> 24 & 0xff, ".", version >> 16 & 0xff, ".", version >> 8 & 0xff);
}

absl::Status Unknown(absl::string_view version) {
  return absl::UnimplementedError(absl::StrCat(
      "Python ", version, ": the layout of its frames is not known here (3.9 to 3.13 are)"));
}

// _Py_DebugOffsets of 3.13, after the cookie.
struct DebugOffsets {
  uint64_t version;
  uint64_t free_threaded;
  struct {
    uint64_t size, finalizing, interpreters_head;
  } runtime_state;
  struct {
    uint64_t size, id, next, threads_head, gc, imports_modules, sysdict, builtins, ceval_gil,
        gil_runtime_state, gil_runtime_state_enabled, gil_runtime_state_locked,
        gil_runtime_state_holder;
  } interpreter_state;
  struct {
    uint64_t size, prev, next, interp, current_frame, thread_id, native_thread_id, datastack_chunk,
        status;
  } thread_state;
  struct {
    uint64_t size, previous, executable, instr_ptr, localsplus, owner;
  } interpreter_frame;
  struct {
    uint64_t size, filename, name, qualname, linetable, firstlineno, argcount, localsplusnames,
        localspluskinds, co_code_adaptive;
  } code_object;
  struct {
    uint64_t size, ob_type;
  } pyobject;
  struct {
    uint64_t size, tp_name, tp_repr, tp_flags;
  } type_object;
  struct {
    uint64_t size, ob_item, ob_size;
  } tuple_object;
  struct {
    uint64_t size, ob_item, ob_size;
  } list_object;
  struct {
    uint64_t size, ma_keys, ma_values;
  } dict_object;
  struct {
    uint64_t size, ob_fval;
  } float_object;
  struct {
    uint64_t size, lv_tag, ob_digit;
  } long_object;
  struct {
    uint64_t size, ob_size, ob_sval;
  } bytes_object;
  struct {
    uint64_t size, state, length, asciiobject_size;
  } unicode_object;
};

absl::StatusOr<PythonLayout> FromDebugOffsets(const MemoryReader& memory, uint64_t runtime) {
  uint64_t version = 0;
  if (!memory.ReadValue(runtime + kCookieBytes, &version)) {
    return absl::DataLossError("the version of its Python cannot be read");
  }
  if (version >> 16 != 0x030d || (version >> 4 & 0xf) != kReleaseFinal) {
    return Unknown(VersionName(version));
  }
  DebugOffsets at;
  if (!memory.ReadValue(runtime + kCookieBytes, &at)) {
    return absl::DataLossError(
        absl::StrCat("Python ", VersionName(version), ": its debug offsets cannot be read"));
  }
  if (at.free_threaded != 0) {
    return absl::UnimplementedError(absl::StrCat(
        "Python ", VersionName(version), ": frames of a build without the GIL are not read here"));
  }
  PythonLayout layout = {
      .version = VersionName(version),
      .lines = PythonLayout::Lines::kLocations,
      .interpreters = at.runtime_state.interpreters_head,
      .interpreter_next = at.interpreter_state.next,
      .interpreter_threads = at.interpreter_state.threads_head,
      .thread_next = at.thread_state.next,
      .thread_interpreter = at.thread_state.interp,
      .thread_id = at.thread_state.thread_id,
      .thread_native_id = at.thread_state.native_thread_id,
      .thread_frame = at.thread_state.current_frame,
      .has_cframe = false,
      .cframe_frame = 0,
      .frame_previous = at.interpreter_frame.previous,
      .frame_code = at.interpreter_frame.executable,
      .frame_instruction = at.interpreter_frame.instr_ptr,
      .instruction_bytes = 0,
      .frame_owner = at.interpreter_frame.owner,
      .frame_bytes = at.interpreter_frame.size,
      .code_filename = at.code_object.filename,
      .code_name = at.code_object.qualname,
      .code_lines = at.code_object.linetable,
      .code_first_line = at.code_object.firstlineno,
      .code_instructions = at.code_object.co_code_adaptive,
      .code_bytes = at.code_object.size,
      .bytes_length = at.bytes_object.ob_size,
      .bytes_data = at.bytes_object.ob_sval,
      .text_length = at.unicode_object.length,
      .text_state = at.unicode_object.state,
      .text_ascii = at.unicode_object.asciiobject_size,
      // PyCompactUnicodeObject adds the length and the address of its UTF-8.
      .text_other = at.unicode_object.asciiobject_size + 2 * sizeof(uint64_t),
  };
  // No structure of 3.13 except the interpreter's is larger than a page.
  constexpr uint64_t kLargest = 4096, kLargestOfAll = 4 << 20;
  for (const uint64_t offset :
       {layout.interpreters, layout.interpreter_next, layout.interpreter_threads}) {
    if (offset > kLargestOfAll)
      return absl::DataLossError("the debug offsets of its Python are wrong");
  }
  // The parts of frames and code objects are read together with the whole object.
  const bool inside =
      std::max({layout.frame_previous, layout.frame_code, layout.frame_instruction}) + 8 <=
          layout.frame_bytes &&
      layout.frame_owner < layout.frame_bytes &&
      std::max(
          {layout.code_filename, layout.code_name, layout.code_lines, layout.code_first_line}) +
              8 <=
          layout.code_bytes;
  const uint64_t largest =
      std::max({layout.thread_next,      layout.thread_interpreter, layout.thread_id,
                layout.thread_native_id, layout.thread_frame,       layout.frame_previous,
                layout.frame_code,       layout.frame_instruction,  layout.frame_bytes,
                layout.code_filename,    layout.code_name,          layout.code_lines,
                layout.code_first_line,  layout.code_bytes,         layout.code_instructions,
                layout.bytes_length,     layout.bytes_data,         layout.text_length,
                layout.text_state,       layout.text_ascii});
  if (!inside || largest > kLargest) {
    return absl::DataLossError("the debug offsets of its Python are wrong");
  }
  return layout;
}

}  // namespace

int PythonMinorOf(absl::string_view file) {
  constexpr absl::string_view kName = "python3.";
  const size_t at = file.find(kName);
  if (at == absl::string_view::npos) return -1;
  file.remove_prefix(at + kName.size());
  const size_t digits = std::min(file.find_first_not_of("0123456789"), file.size());
  int minor = -1;
  return digits <= 3 && absl::SimpleAtoi(file.substr(0, digits), &minor) ? minor : -1;
}

absl::StatusOr<PythonLayout> ReadPythonLayout(const MemoryReader& memory,
                                              const PythonSymbols& symbols) {
  char cookie[kCookieBytes];
  if (!memory.Read(symbols.runtime, cookie, sizeof(cookie))) {
    return absl::DataLossError("the memory of its Python cannot be read");
  }
  if (memcmp(cookie, kCookie, kCookieBytes) == 0) return FromDebugOffsets(memory, symbols.runtime);
  uint64_t version = 0;
  if (symbols.version != 0) {
    if (!memory.ReadValue(symbols.version, &version)) {
      return absl::DataLossError("the version of its Python cannot be read");
    }
    const bool is_final = (version >> 4 & 0xf) == kReleaseFinal;
    PythonLayout layout;
    if (version >> 16 == 0x030b && is_final) {
      layout = Layout311();
    } else if (version >> 16 == 0x030c && is_final) {
      layout = Layout312();
    } else {
      return Unknown(VersionName(version));
    }
    layout.version = VersionName(version);
    return layout;
  }
  switch (const int minor = PythonMinorOf(symbols.file)) {
    case 9:
      return Layout39();
    case 10:
      return Layout310();
    case -1:
      return absl::UnimplementedError(absl::StrCat(
          "the version of the Python in ", symbols.file,
          " cannot be determined: 3.9 and 3.10 are recognized by the name of their file"));
    default:
      return Unknown(absl::StrCat("3.", minor));
  }
}

}  // namespace muster::agent
