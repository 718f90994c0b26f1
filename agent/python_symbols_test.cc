#include "agent/python_symbols.h"

#include <elfutils/libdwfl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <optional>
#include <string>

namespace muster::agent {
namespace {

int NoDebugFile(Dwfl_Module*, void**, const char*, Dwarf_Addr, const char*, const char*, GElf_Word,
                char**) {
  return -1;
}

std::optional<PythonSymbols> Find(pid_t pid) {
  const Dwfl_Callbacks callbacks = {.find_elf = dwfl_linux_proc_find_elf,
                                    .find_debuginfo = NoDebugFile,
                                    .section_address = nullptr,
                                    .debuginfo_path = nullptr};
  Dwfl* const dwfl = dwfl_begin(&callbacks);
  EXPECT_EQ(dwfl_linux_proc_report(dwfl, pid), 0);
  EXPECT_EQ(dwfl_report_end(dwfl, nullptr, nullptr), 0);
  std::optional<PythonSymbols> found = FindPython(dwfl, pid);
  dwfl_end(dwfl);
  return found;
}

TEST(PythonSymbols, ProgramWithoutPython_HasNone) { EXPECT_FALSE(Find(getpid()).has_value()); }

TEST(PythonSymbols, Python3_HasItsRuntime) {
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    dup2(ready[1], STDOUT_FILENO);
    execl("/usr/bin/python3", "python3", "-c",
          "import time; print('r', flush=True); time.sleep(3600)", nullptr);
    _exit(127);
  }
  close(ready[1]);
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1) << "no /usr/bin/python3?";
  const std::optional<PythonSymbols> found = Find(pid);
  ASSERT_TRUE(found.has_value());
  EXPECT_NE(found->runtime, 0u);
  EXPECT_NE(found->file.find("python"), std::string::npos);
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  close(ready[0]);
}

}  // namespace
}  // namespace muster::agent
