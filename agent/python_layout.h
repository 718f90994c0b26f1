#ifndef MUSTER_AGENT_PYTHON_LAYOUT_H_
#define MUSTER_AGENT_PYTHON_LAYOUT_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "agent/memory_reader.h"

namespace muster::agent {

// The places where a process that runs CPython keeps the data of Python frames: offsets in bytes,
// as the headers of that version of CPython define them.
struct PythonLayout {
  // How co_linetable (before 3.10: co_lnotab) encodes the line to which an instruction belongs.
  enum class Lines { kDeltas, kRanges, kLocations };

  std::string version;  // "3.11.2"; "3.10" if only its file name tells
  Lines lines = Lines::kLocations;

  uint64_t interpreters;         // _PyRuntimeState: the first interpreter
  uint64_t interpreter_next;     // PyInterpreterState
  uint64_t interpreter_threads;  // the first thread state
  uint64_t thread_next;          // PyThreadState
  uint64_t thread_interpreter;
  uint64_t thread_id;         // the id of pthreads
  uint64_t thread_native_id;  // the kernel's, in the pid namespace of the process; 0: not kept
  uint64_t thread_frame;      // the innermost frame, or a _PyCFrame that has it at `cframe_frame`
  bool has_cframe;
  uint64_t cframe_frame;
  uint64_t frame_previous;  // _PyInterpreterFrame, before 3.11 PyFrameObject
  uint64_t frame_code;
  // The instruction: a pointer to it, or its number (before 3.11).
  uint64_t frame_instruction;
  int instruction_bytes;   // the size of a numbered one: 1 in 3.9, 2 in 3.10; 0: it is a pointer
  uint64_t frame_owner;    // 0: not kept; a frame of owner 3 is the interpreter's own, not Python's
  uint64_t frame_bytes;    // the size of all of the above
  uint64_t code_filename;  // PyCodeObject
  uint64_t code_name;      // qualified from 3.11 on
  uint64_t code_lines;
  uint64_t code_first_line;
  uint64_t code_instructions;  // where the instructions begin; 0: elsewhere
  uint64_t code_bytes;         // the size of all of the above
  uint64_t bytes_length;       // PyBytesObject
  uint64_t bytes_data;
  uint64_t text_length;  // PyUnicodeObject
  uint64_t text_state;
  uint64_t text_ascii;  // where the characters begin if all are ASCII
  uint64_t text_other;  // where they begin if not
};

// What the symbols and the file name of a program or library reveal about its CPython.
struct PythonSymbols {
  uint64_t runtime = 0;  // address of _PyRuntime
  uint64_t version = 0;  // the value of Py_Version, from 3.11 on; 0: it has none
  std::string file;      // "libpython3.10.so.1.0"
};

// Errors: UNIMPLEMENTED "Python 3.14.0: ..." the layout of this version, or of this build of it, is
// not known here; DATA_LOSS what the process says about it cannot be read or cannot be true.
absl::StatusOr<PythonLayout> ReadPythonLayout(const MemoryReader& memory,
                                              const PythonSymbols& symbols);

// Returns 10 for "libpython3.10.so.1.0" and "python3.10"; -1: the name does not tell.
int PythonMinorOf(absl::string_view file);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_PYTHON_LAYOUT_H_
