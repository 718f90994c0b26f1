#include "worker/nested/plain_parts.h"

#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/List.h"
#include "ATen/core/ivalue.h"
#include "gtest/gtest.h"

namespace muster::nested_internal {
namespace {

struct Tree {
  at::Tensor value;
  std::vector<Tree> children;
};
struct Batch {
  at::Tensor ids;
  std::vector<std::string> names;
};
class Plain {
 public:
  explicit Plain(std::string text) : text_(std::move(text)) {}

 private:
  std::string text_;
};
auto MusterFields(const Plain&) { return std::tie(); }

template <class T>
constexpr bool Is(bool any, bool numbers, bool alone) {
  constexpr PlainParts kParts = PlainPartsOf<T>();
  return kParts.any == any && kParts.numbers == numbers && kParts.alone == alone;
}

TEST(PlainPartsOf, TensorsAlone_AreNone) {
  EXPECT_TRUE(Is<at::Tensor>(false, false, false));
  EXPECT_TRUE((Is<std::map<std::string, std::pair<at::Tensor, at::Tensor>>>(false, false, false)));
  EXPECT_TRUE(Is<Tree>(false, false, false));
  EXPECT_TRUE(Is<c10::IValue>(false, false, false));
}

TEST(PlainPartsOf, NumbersAndTexts_AreAlone) {
  EXPECT_TRUE((Is<std::pair<at::Tensor, int>>(true, true, true)));
  EXPECT_TRUE((Is<std::pair<at::Tensor, bool>>(true, false, true)));
  EXPECT_TRUE((Is<std::pair<at::Tensor, std::string>>(true, false, true)));
  EXPECT_TRUE((Is<std::vector<std::pair<at::Tensor, std::optional<double>>>>(true, true, true)));
  EXPECT_TRUE((Is<std::pair<at::Tensor, Plain>>(false, false, false)));
}

TEST(PlainPartsOf, ListsWithoutTensors_AreNotAlone) {
  EXPECT_TRUE(Is<Batch>(true, false, false));
  EXPECT_TRUE((Is<std::pair<at::Tensor, std::vector<float>>>(true, true, false)));
  EXPECT_TRUE((Is<std::map<int, std::vector<std::pair<int, std::string>>>>(true, true, false)));
  EXPECT_TRUE(Is<c10::List<int64_t>>(true, true, true));
  EXPECT_TRUE(Is<std::set<int>>(true, false, true));
}

}  // namespace
}  // namespace muster::nested_internal
