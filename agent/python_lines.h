#ifndef MUSTER_AGENT_PYTHON_LINES_H_
#define MUSTER_AGENT_PYTHON_LINES_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "agent/python_layout.h"

namespace muster::agent {

// Returns the line of the instruction at `offset` (in bytes from the first one; negative: the code
// has not begun) of a code object with this `table` of lines. 0: the table does not say. The table
// may have any content.
int64_t PythonLine(PythonLayout::Lines kind, absl::string_view table, int64_t first_line,
                   int64_t offset);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_PYTHON_LINES_H_
