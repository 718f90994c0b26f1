// The short version of tests/soak: half a minute, under AddressSanitizer two.
#include "tests/soak/soak.h"

#include <cstdio>

#include "absl/strings/str_join.h"
#include "gtest/gtest.h"

namespace muster::soak {
namespace {

#ifdef __SANITIZE_ADDRESS__
const SoakOptions kShort = {.duration = absl::Minutes(2), .memory_bytes = int64_t{4} << 30};
#else
const SoakOptions kShort = {.duration = absl::Seconds(30)};
#endif

TEST(Soak, EverythingAtOnce_NothingIsLostAndNothingCrashes) {
  SoakOptions options = kShort;
  options.report = [](const std::string& line) { std::fprintf(stderr, "%s\n", line.c_str()); };
  const std::vector<std::string> wrong = Soak(options);
  EXPECT_TRUE(wrong.empty()) << absl::StrJoin(wrong, "\n");
}

}  // namespace
}  // namespace muster::soak
