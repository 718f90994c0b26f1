#include "client/cli/output.h"

#include <nlohmann/json.hpp>

#include "base/yaml.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

TEST(Output, TableText_Columns_AreAligned) {
  EXPECT_EQ(TableText({{"JOB", "STATE"}, {"mnist-17", ""}}), "JOB       STATE\nmnist-17  -\n");
}

TEST(Output, TableText_ControlCharacters_AreShownAsText) {
  EXPECT_EQ(TableText({{"a\x1b[2J"}}), "a\\x1b[2J\n");
}

TEST(Output, YamlText_NestedValues_ReadBackAsTheSame) {
  const nlohmann::ordered_json value = {
      {"a", {{"no", "yes"}, {"n", 1}, {"none", nullptr}}},
      {"list", {"x", {{"deep", {1, 2}}}, nlohmann::ordered_json::array()}},
      {"text", "two\nlines: \"quoted\""}};
  const auto read = ParseYaml(YamlText(value), "text");
  ASSERT_TRUE(read.ok()) << read.status() << YamlText(value);
  EXPECT_EQ(read->value, nlohmann::json(value)) << YamlText(value);
}

}  // namespace
}  // namespace muster::client
