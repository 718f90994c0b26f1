#include "tests/conformance/golden_cases.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <utility>

namespace muster::conformance {

std::string GoldenFolder() {
  const char* folder = std::getenv("MUSTER_GOLDEN");
  EXPECT_NE(folder, nullptr)
      << "MUSTER_GOLDEN must name the folder of the golden cases (tools/test sets it)";
  return folder == nullptr ? "" : folder;
}

std::vector<nlohmann::json> GoldenCases(const std::string& file, const std::string& kind) {
  const std::string path = GoldenFolder() + "/" + file;
  std::ifstream stream(path);
  std::vector<nlohmann::json> cases;
  for (std::string line; std::getline(stream, line);) {
    nlohmann::json parsed = nlohmann::json::parse(line);
    if (parsed.at("kind") == kind) cases.push_back(std::move(parsed));
  }
  EXPECT_FALSE(cases.empty()) << "no cases of kind " << kind << " in " << path;
  return cases;
}

}  // namespace muster::conformance
