#ifndef MUSTER_TESTS_PARITY_EXPECT_TRAJECTORY_H_
#define MUSTER_TESTS_PARITY_EXPECT_TRAJECTORY_H_

#include <nlohmann/json.hpp>
#include <string>

namespace muster::parity {

// Compares `got`, an answer to the golden `training` case `test_case`, with its `out` within its
// tolerances. `folder`: where the paths of the case start from.
void ExpectTrajectory(const nlohmann::json& got, const nlohmann::json& test_case,
                      const std::string& folder);

}  // namespace muster::parity

#endif  // MUSTER_TESTS_PARITY_EXPECT_TRAJECTORY_H_
