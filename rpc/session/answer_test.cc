#include "rpc/session/answer.h"

#include <gtest/gtest.h>

#include <string>

namespace muster::rpc {
namespace {

TEST(Answer, Reply_IsTheSerialisedReplyOfAnySizeAndKind) {
  for (const size_t size : {0, 1, 100, 127, 128, 5000, 3'000'000}) {
    v1::OpResult result;
    result.mutable_arrive();  // one byte of tag
    if (size > 0) result.mutable_arrive()->add_payloads(std::string(size, 'x'));
    const Answer arrive(result);
    EXPECT_EQ(arrive.kind(), v1::OpResult::kArrive);
    EXPECT_EQ(arrive.reply(), result.arrive().SerializeAsString()) << size;
    EXPECT_EQ(arrive.Parse().SerializeAsString(), result.SerializeAsString());
    EXPECT_EQ(arrive.bytes(), result.SerializeAsString());
    result.mutable_txn();  // two bytes of tag
    if (size > 0) result.mutable_txn()->add_results()->add_kvs()->set_key(std::string(size, 'x'));
    EXPECT_EQ(Answer(result).reply(), result.txn().SerializeAsString()) << size;
  }
}

TEST(Answer, Error_HasNoKind) {
  v1::OpResult result;
  result.mutable_error()->set_message("no");
  const Answer answer(result);
  EXPECT_EQ(answer.kind(), v1::OpResult::KIND_NOT_SET);
  EXPECT_EQ(answer.Parse().error().message(), "no");
}

}  // namespace
}  // namespace muster::rpc
