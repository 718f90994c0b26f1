#ifndef MUSTER_TESTS_CONFORMANCE_GOLDEN_CASES_H_
#define MUSTER_TESTS_CONFORMANCE_GOLDEN_CASES_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace muster::conformance {

// The folder of the shared golden cases: MUSTER_GOLDEN, set by tools/test. A test failure and "" if
// it is not set.
std::string GoldenFolder();

// The cases of one kind in `file` of that folder, in order. A test failure if there are none.
std::vector<nlohmann::json> GoldenCases(const std::string& file, const std::string& kind);

}  // namespace muster::conformance

#endif  // MUSTER_TESTS_CONFORMANCE_GOLDEN_CASES_H_
