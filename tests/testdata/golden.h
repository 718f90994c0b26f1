#ifndef MUSTER_TESTS_TESTDATA_GOLDEN_H_
#define MUSTER_TESTS_TESTDATA_GOLDEN_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace muster::testing_support {

// Returns the folder of the recorded cases (README.md next to this file): $MUSTER_GOLDEN if it is
// set, else tests/testdata/golden of this repository.
std::string GoldenFolder();

// Returns a file or folder of tests/testdata.
std::string TestdataPath(const std::string& file);

// Returns a file of GoldenFolder().
std::string GoldenPath(const std::string& file);

// Returns the cases of one kind in `file` of that folder, by default KIND.jsonl, in order. A test
// failure if there are none.
std::vector<nlohmann::json> GoldenCases(const std::string& kind, const std::string& file = "");

}  // namespace muster::testing_support

#endif  // MUSTER_TESTS_TESTDATA_GOLDEN_H_
