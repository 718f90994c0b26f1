#ifndef MUSTER_AGENT_PYTHON_SYMBOLS_H_
#define MUSTER_AGENT_PYTHON_SYMBOLS_H_

#include <elfutils/libdwfl.h>
#include <sys/types.h>

#include <optional>

#include "agent/python_layout.h"

namespace muster::agent {

// Finds the CPython in process `pid`, whose modules `dwfl` has: in its executable or in a
// libpython. nullopt: there is none. Reads symbol tables of files, nothing of the process itself.
std::optional<PythonSymbols> FindPython(Dwfl* dwfl, pid_t pid);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_PYTHON_SYMBOLS_H_
