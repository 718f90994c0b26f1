#include "tests/parity/expect_trajectory.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "muster/checkpoint.h"
#include "tests/support/bf16_instructions.h"

namespace muster::parity {
namespace {

using Json = nlohmann::json;
using testing_support::HasBf16Instructions;

void ExpectNear(const Json& got, const Json& want, double absolute, double relative,
                const std::string& what) {
  if (want.is_array()) {
    ASSERT_TRUE(got.is_array() && got.size() == want.size())
        << what << ": got " << got.dump().substr(0, 200) << " want " << want.dump().substr(0, 200);
    for (size_t i = 0; i < want.size(); ++i) {
      ExpectNear(got[i], want[i], absolute, relative, what + "[" + std::to_string(i) + "]");
    }
    return;
  }
  const double g = got.get<double>(), w = want.get<double>();
  EXPECT_LE(std::abs(g - w), absolute + relative * std::abs(w))
      << what << ": got " << g << " want " << w;
}

}  // namespace

void ExpectTrajectory(const Json& got, const Json& test_case, const std::string& folder) {
  const Json &in = test_case["in"], &want = test_case["out"];
  const Json& tolerance = want.contains("tolerance_other_cpu") && HasBf16Instructions()
                              ? want["tolerance_other_cpu"]
                              : want["tolerance"];
  EXPECT_EQ(got["sync"], want["sync"]);
  ExpectNear(got["loss"], want["loss"], tolerance["loss"], 0, "loss");
  ExpectNear(got["lr"], want["lr"], 1e-9, 1e-9, "lr");
  ExpectNear(got["final_lr"], want["final_lr"], 1e-9, 1e-9, "final_lr");
  ExpectNear(got["grad_norm"], want["grad_norm"], 0, tolerance["grad_norm"], "grad_norm");

  const auto weights = LoadTensors(got["final_weights"]);
  const auto expected = LoadTensors(folder + "/" + want["final_weights"].get<std::string>());
  const auto initial = LoadTensors(folder + "/" + in["initial_weights"].get<std::string>());
  ASSERT_EQ(weights.size(), expected.size());
  double off = 0, moved = 0, worst = 0;
  for (const auto& [key, tensor] : expected) {
    ASSERT_TRUE(weights.count(key)) << key;
    const at::Tensor error = weights.at(key).to(at::kDouble) - tensor.to(at::kDouble);
    worst = std::max(worst, error.abs().max().item<double>());
    off += error.square().sum().item<double>();
    moved +=
        (tensor.to(at::kDouble) - initial.at(key).to(at::kDouble)).square().sum().item<double>();
  }
  EXPECT_LE(worst, tolerance["weights"].get<double>());
  EXPECT_LE(std::sqrt(off / moved), tolerance["update"].get<double>());
}

}  // namespace muster::parity
