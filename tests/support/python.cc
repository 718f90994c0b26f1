#include "tests/support/python.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <iostream>

#include "tests/support/command.h"

namespace muster::testing_support {

std::string PythonWith(const std::string& modules) {
  const char* const given = std::getenv("MUSTER_TEST_TORCH_PYTHON");
  const std::string python = given != nullptr ? given : "/usr/bin/python3";
  const CommandResult probe = RunCommand(python + " -c 'import " + modules + "' 2>&1");
  if (probe.exit_code == 0) return python;
  EXPECT_EQ(given, nullptr) << python << ", which MUSTER_TEST_TORCH_PYTHON names: " << probe.output;
  std::cout << "skipped: " << python << " lacks one of " << modules << "\n";
  return "";
}

}  // namespace muster::testing_support
