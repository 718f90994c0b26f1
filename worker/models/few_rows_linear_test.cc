#include "worker/models/few_rows_linear.h"

#include <gtest/gtest.h>

#include "ATen/Functions.h"
#include "ATen/Parallel.h"
#include "ATen/TensorOperators.h"
#include "ATen/core/grad_mode.h"

namespace muster::models {
namespace {

TEST(LinearOf, FewRows_AreLibTorchsWithinRounding) {
  const at::NoGradGuard no_grad;
  for (const c10::ScalarType type : {c10::kFloat, c10::kBFloat16}) {
    for (const int64_t in : {129, 576}) {
      for (int64_t rows = 1; rows <= kFewRows + 1; ++rows) {
        const at::Tensor x = at::randn({rows, 1, in}).to(type);
        const at::Tensor weight = at::randn({300, in}).to(type);
        const at::Tensor bias = at::randn({300}).to(type);
        const at::Tensor want =
            at::linear(x.to(c10::kDouble), weight.to(c10::kDouble), bias.to(c10::kDouble));
        const at::Tensor got = LinearOf(x, weight, bias);
        EXPECT_EQ(got.scalar_type(), type);
        EXPECT_EQ(got.sizes(), at::IntArrayRef({rows, 1, 300}));
        const double rounding = type == c10::kFloat ? 1e-4 : 0.3;
        EXPECT_LE((got.to(c10::kDouble) - want).abs().max().item<double>(), rounding);
      }
    }
  }
}

// The output of a row depends neither on other rows nor on the threads.
TEST(LinearOf, NumberOfRowsAndThreads_ChangesNothing) {
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::randn({7, 256}), weight = at::randn({1000, 256});
  const int threads = at::get_num_threads();
  at::set_num_threads(1);
  const at::Tensor all = LinearOf(x, weight, {});
  at::set_num_threads(3);
  EXPECT_TRUE(at::equal(all, LinearOf(x, weight, {})));
  for (int64_t row = 0; row < 7; ++row) {
    EXPECT_TRUE(at::equal(all[row], LinearOf(x[row], weight, {})));
  }
  at::set_num_threads(threads);
}

TEST(LinearOf, Gradients_AreLibTorchs) {
  const at::Tensor x = at::randn({1, 256}), weight = at::randn({1000, 256}).requires_grad_(true);
  LinearOf(x, weight, {}).sum().backward();
  EXPECT_TRUE(at::allclose(weight.grad(), x.expand({1000, 256})));
}

}  // namespace
}  // namespace muster::models
