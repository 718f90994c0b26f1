#include "coordinator/remembered_answers.h"

#include <gtest/gtest.h>

#include <memory>
#include <string>

#include "proto/muster/v1/kv.pb.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::coordinator {
namespace {

using State = RememberedAnswers::State;

v1::Fence Fence(const std::string& worker_id, uint64_t incarnation, uint64_t request_id) {
  v1::Fence fence;
  fence.set_worker_id(worker_id);
  fence.set_incarnation(incarnation);
  fence.set_request_id(request_id);
  return fence;
}

StoredAnswer Stored(uint64_t durable) {
  return {std::make_shared<const Answer>(v1::OpResult()), durable};
}

TEST(HashRequest, FenceChanges_HashStays) {
  v1::TxnRequest request;
  request.add_then()->mutable_get()->set_key("a");
  const uint64_t without = HashRequest(request, 1);
  *request.mutable_fence() = Fence("w0", 7, 1);
  EXPECT_EQ(HashRequest(request, 1), without);
  request.mutable_fence()->set_worker_id(std::string(200, 'w'));  // its length takes two bytes
  EXPECT_EQ(HashRequest(request, 1), without);
  EXPECT_NE(HashRequest(request, 2), without);
  request.mutable_then(0)->mutable_get()->set_key("b");
  EXPECT_NE(HashRequest(request, 1), without);
}

TEST(RememberedAnswers, Worker_IsAnsweredOnceForEachIncarnation) {
  RememberedAnswers answers(8, 1 << 20);
  StoredAnswer found;
  EXPECT_EQ(answers.Find(Fence("w0", 7, 1), 5, &found), State::kNew);
  answers.Remember("w0", 7, 1, 5, Stored(9));
  EXPECT_EQ(answers.Find(Fence("w0", 7, 1), 5, &found), State::kKnown);
  EXPECT_EQ(found.durable_revision, 9u);
  EXPECT_EQ(answers.Find(Fence("w0", 7, 1), 6, &found), State::kReused);
  EXPECT_EQ(answers.Find(Fence("w0", 8, 1), 5, &found), State::kNew);
  answers.Forget("w0");
  EXPECT_EQ(answers.Find(Fence("w0", 7, 1), 5, &found), State::kNew);
}

TEST(RememberedAnswers, OperatorsProcesses_AreToldApartByIncarnation) {
  RememberedAnswers answers(8, 1 << 20);
  StoredAnswer found;
  answers.Remember("", 7, 1, 5, Stored(1));
  EXPECT_EQ(answers.Find(Fence("", 7, 1), 5, &found), State::kKnown);
  EXPECT_EQ(answers.Find(Fence("", 8, 1), 5, &found), State::kNew);
  answers.ForEach([](const std::string& worker_id, uint64_t incarnation, uint64_t, uint64_t,
                     const StoredAnswer&) {
    EXPECT_EQ(worker_id, "");
    EXPECT_EQ(incarnation, 7u);
  });
}

TEST(RememberedAnswers, CanRemember_NeedsARequestIdAndSomebody) {
  EXPECT_TRUE(RememberedAnswers::CanRemember(Fence("w0", 7, 1)));
  EXPECT_TRUE(RememberedAnswers::CanRemember(Fence("", 7, 1)));
  EXPECT_FALSE(RememberedAnswers::CanRemember(Fence("", 0, 1)));
  EXPECT_FALSE(RememberedAnswers::CanRemember(Fence("w0", 7, 0)));
}

TEST(RememberedAnswers, ManyOperators_TheOldestIsForgotten) {
  RememberedAnswers answers(8, 1 << 20);
  for (uint64_t i = 1; i <= RememberedAnswers::kMaxOperators + 1; ++i) {
    answers.Remember("", i, 1, 5, Stored(1));
  }
  StoredAnswer found;
  EXPECT_EQ(answers.Find(Fence("", 1, 1), 5, &found), State::kNew);
  EXPECT_EQ(answers.Find(Fence("", 2, 1), 5, &found), State::kKnown);
}

TEST(RememberedAnswers, Dropped_AreKnownToHaveBeenAnswered) {
  RememberedAnswers answers(/*keep=*/1, 1 << 20);
  answers.Remember("w0", 7, 1, 5, Stored(1));
  answers.Remember("w0", 7, 2, 5, Stored(2));
  StoredAnswer found;
  EXPECT_EQ(answers.Find(Fence("w0", 7, 1), 5, &found), State::kForgotten);
  RememberedAnswers restored(1, 1 << 20);
  answers.ForEachForgotten([&](const std::string& worker_id, uint64_t incarnation, uint64_t up_to) {
    restored.RememberForgotten(worker_id, incarnation, up_to);
  });
  EXPECT_EQ(restored.Find(Fence("w0", 7, 1), 5, &found), State::kForgotten);
  EXPECT_EQ(restored.Find(Fence("w0", 7, 2), 5, &found), State::kNew);
}

}  // namespace
}  // namespace muster::coordinator
