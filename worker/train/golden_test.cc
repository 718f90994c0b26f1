#include "worker/train/golden.h"

#include <cmath>
#include <cstdlib>
#include <fstream>
#include <string>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace muster {
namespace {

using Json = nlohmann::json;
using Runner = Json (*)(const Json&);

bool Near(const Json& got, const Json& want, double tolerance) {
  if (want.is_number() && got.is_number()) {
    const double a = got.get<double>(), b = want.get<double>();
    return std::fabs(a - b) <= tolerance * std::max(1.0, std::fabs(b)) ||
           std::fabs(a - b) <= tolerance * std::fabs(b);
  }
  if (want.is_array() && got.is_array()) {
    if (want.size() != got.size()) return false;
    for (size_t i = 0; i < want.size(); ++i) {
      if (!Near(got[i], want[i], tolerance)) return false;
    }
    return true;
  }
  if (want.is_object() && got.is_object()) {
    if (want.size() != got.size()) return false;
    for (const auto& [key, value] : want.items()) {
      if (!got.contains(key) || !Near(got[key], value, tolerance)) return false;
    }
    return true;
  }
  return got == want;
}

std::vector<Json> Cases(const std::string& file) {
  const char* dir = std::getenv("MUSTER_GOLDEN");
  EXPECT_NE(dir, nullptr) << "set MUSTER_GOLDEN to the folder of the shared cases";
  std::ifstream in(std::string(dir == nullptr ? "." : dir) + "/" + file);
  EXPECT_TRUE(in.good()) << file;
  std::vector<Json> cases;
  for (std::string line; std::getline(in, line);) cases.push_back(Json::parse(line));
  return cases;
}

void ExpectAll(const std::string& kind, Runner run, double tolerance) {
  size_t count = 0;
  for (const Json& c : Cases(kind + ".jsonl")) {
    ++count;
    if (c.contains("error")) {
      EXPECT_ANY_THROW(run(c["in"])) << c["id"];
      continue;
    }
    const Json got = run(c["in"]);
    EXPECT_TRUE(Near(got, c["out"], tolerance))
        << c["id"] << "\n got " << got << "\nwant " << c["out"];
  }
  EXPECT_GT(count, 10u);
}

TEST(Golden, LrScheduler_AllCases) { ExpectAll("lr_scheduler", RunLrSchedulerCase, 1e-9); }
TEST(Golden, GradAccumulation_AllCases) {
  ExpectAll("grad_accumulation", RunGradAccumulationCase, 0);
}
TEST(Golden, ClipGrad_AllCases) { ExpectAll("clip_grad", RunClipGradCase, 2e-6); }

Json Quirk(const std::string& id) {
  for (const Json& c : Cases("quirks.jsonl")) {
    if (c["id"] == id) return c;
  }
  ADD_FAILURE() << "no " << id;
  return {};
}

// A one-cycle schedule stops at step total_steps - 1: the rate never rises again once it came down.
TEST(Golden, Quirk_OneCycleDoesNotBounce) {
  for (int i = 1; i <= 6; ++i) {
    const Json quirk = Quirk("quirk/lr_scheduler/s00" + std::to_string(i));
    const Json got = RunLrSchedulerCase(quirk["in"]);
    const int64_t last = quirk["in"]["scheduler"]["total_steps"].get<int64_t>() - 1;
    EXPECT_EQ(got["scheduler_steps"].back().get<int64_t>(), last);
    EXPECT_NEAR(got["lr"].back().get<double>(), 8e-7, 1e-12);
    for (size_t k = 0; k < got["lr"].size(); ++k) {
      if (quirk["hf"]["scheduler_steps"][k].get<int64_t>() > last) break;
      EXPECT_NEAR(got["lr"][k].get<double>(), quirk["hf"]["lr"][k].get<double>(), 1e-9);
    }
  }
}

// adjust_scheduler as Accelerate has it changes nothing; Muster's own is off unless asked for
// (D12).
TEST(Golden, Quirk_AdjustSchedulerIsOptIn) {
  for (int i = 7; i <= 8; ++i) {
    const Json quirk = Quirk("quirk/lr_scheduler/s00" + std::to_string(i));
    const Json got = RunLrSchedulerCase(quirk["in"]);
    EXPECT_TRUE(Near(got, quirk["hf"], 1e-9)) << got;
  }
}

// Leaving a loop at its last batch leaves nothing behind (D5): the count goes on from zero.
TEST(Golden, D05_Quirk_BreakAtLastBatchDoesNotSyncForEver) {
  const Json got = RunGradAccumulationCase(Quirk("quirk/grad_accumulation/s001")["in"]);
  std::string syncs;
  for (const Json& step : got["steps"]) syncs += step["sync"].get<bool>() ? 'S' : '.';
  EXPECT_EQ(syncs, "..SS..S..S");
}

}  // namespace
}  // namespace muster
