#ifndef MUSTER_TESTS_SUPPORT_PYTHON_H_
#define MUSTER_TESTS_SUPPORT_PYTHON_H_

#include <string>

namespace muster::testing_support {

// Returns a Python that can import these modules ("torch, transformers"): the one that
// MUSTER_TEST_TORCH_PYTHON names, whose lack of them is a test failure, else /usr/bin/python3.
// Empty if that one lacks them, which is printed: the caller skips what needs them.
std::string PythonWith(const std::string& modules);

}  // namespace muster::testing_support

#endif  // MUSTER_TESTS_SUPPORT_PYTHON_H_
