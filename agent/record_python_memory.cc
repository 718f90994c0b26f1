// Records the memory from which the stacks of a Python process are read, for
// tests/testdata/python_memory.
#include <elfutils/libdwfl.h>
#include <stdio.h>
#include <stdlib.h>

#include <optional>

#include "absl/status/statusor.h"
#include "agent/fake_memory.h"
#include "agent/memory_reader.h"
#include "agent/python_layout.h"
#include "agent/python_stack.h"
#include "agent/python_symbols.h"

namespace muster::agent {
namespace {

int NoDebugFile(Dwfl_Module*, void**, const char*, Dwarf_Addr, const char*, const char*, GElf_Word,
                char**) {
  return -1;
}

int Record(pid_t pid) {
  const Dwfl_Callbacks callbacks = {.find_elf = dwfl_linux_proc_find_elf,
                                    .find_debuginfo = NoDebugFile,
                                    .section_address = nullptr,
                                    .debuginfo_path = nullptr};
  Dwfl* const dwfl = dwfl_begin(&callbacks);
  if (dwfl == nullptr || dwfl_linux_proc_report(dwfl, pid) != 0 ||
      dwfl_report_end(dwfl, nullptr, nullptr) != 0) {
    fprintf(stderr, "the memory map of process %d cannot be read\n", pid);
    return 1;
  }
  const std::optional<PythonSymbols> symbols = FindPython(dwfl, pid);
  dwfl_end(dwfl);
  if (!symbols.has_value()) {
    fprintf(stderr, "there is no Python in process %d\n", pid);
    return 1;
  }
  PythonRecording recording = {.symbols = *symbols, .memory = {}};
  const ProcessMemory process(pid);
  const RecordingMemory memory(process, &recording.memory);
  const absl::StatusOr<PythonLayout> layout = ReadPythonLayout(memory, *symbols);
  if (!layout.ok()) {
    fprintf(stderr, "%s\n", layout.status().ToString().c_str());
    return 1;
  }
  const PythonStackReader reader(memory, *layout, symbols->runtime);
  for (const PythonThread& thread : reader.Threads()) {
    fprintf(stderr, "thread %#lx\n", static_cast<unsigned long>(thread.thread_id));
    for (const PythonFrame& frame : reader.Stack(thread, 1024).frames) {
      fprintf(stderr, "  %s\n", frame.ToString().c_str());
    }
  }
  fputs(recording.ToText().c_str(), stdout);
  return 0;
}

}  // namespace
}  // namespace muster::agent

int main(int argc, char** argv) {
  if (argc != 2) {
    fprintf(stderr, "record_python_memory PID > FILE\n");
    return 2;
  }
  return muster::agent::Record(atoi(argv[1]));
}
