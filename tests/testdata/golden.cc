#include "tests/testdata/golden.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <fstream>
#include <utility>

namespace muster::testing_support {

std::string TestdataPath(const std::string& file) {
  // Bazel's runfiles, which every rule that depends on this library has.
  const char* runfiles = std::getenv("TEST_SRCDIR");
  const char* workspace = std::getenv("TEST_WORKSPACE");
  if (runfiles == nullptr || workspace == nullptr) return "tests/testdata/" + file;
  return std::string(runfiles) + "/" + workspace + "/tests/testdata/" + file;
}

std::string GoldenFolder() {
  if (const char* folder = std::getenv("MUSTER_GOLDEN"); folder != nullptr && *folder != '\0') {
    return folder;
  }
  return TestdataPath("golden");
}

std::string GoldenPath(const std::string& file) { return GoldenFolder() + "/" + file; }

std::vector<nlohmann::json> GoldenCases(const std::string& kind, const std::string& file) {
  const std::string path = GoldenPath(file.empty() ? kind + ".jsonl" : file);
  std::ifstream stream(path);
  std::vector<nlohmann::json> cases;
  for (std::string line; std::getline(stream, line);) {
    nlohmann::json parsed = nlohmann::json::parse(line);
    if (parsed.at("kind") == kind) cases.push_back(std::move(parsed));
  }
  EXPECT_FALSE(cases.empty()) << "no cases of kind " << kind << " in " << path;
  return cases;
}

}  // namespace muster::testing_support
