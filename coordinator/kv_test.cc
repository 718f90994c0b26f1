#include "coordinator/kv.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;

const absl::Time kStart = absl::FromUnixSeconds(1000);

class KvTest : public ::testing::Test {
 protected:
  v1::KvOp Put(const std::string& key, const std::string& value,
               v1::KvClass klass = v1::KV_CLASS_EPHEMERAL) {
    v1::KvOp op;
    op.mutable_put()->set_key(key);
    op.mutable_put()->set_value(value);
    op.mutable_put()->set_klass(klass);
    return op;
  }
  v1::KvOp Get(const std::string& key, bool prefix = false) {
    v1::KvOp op;
    op.mutable_get()->set_key(key);
    op.mutable_get()->set_prefix(prefix);
    return op;
  }
  v1::KvOp Delete(const std::string& key, bool prefix = false) {
    v1::KvOp op;
    op.mutable_delete_()->set_key(key);
    op.mutable_delete_()->set_prefix(prefix);
    return op;
  }
  v1::KvOp Add(const std::string& key, int64_t delta) {
    v1::KvOp op;
    op.mutable_add()->set_key(key);
    op.mutable_add()->set_delta(delta);
    return op;
  }
  v1::KvOp Append(const std::string& key, const std::string& value) {
    v1::KvOp op;
    op.mutable_append()->set_key(key);
    op.mutable_append()->set_value(value);
    return op;
  }
  static v1::Compare Exists(const std::string& key, bool exists) {
    v1::Compare compare;
    compare.set_key(key);
    compare.set_target(v1::Compare::EXISTS);
    compare.set_number(exists ? 1 : 0);
    return compare;
  }
  v1::TxnReply Run(const v1::TxnRequest& request, const std::string& worker = "w") {
    v1::TxnReply reply;
    changes_.clear();
    error_ = store_.Txn(request, worker, revision_ + 1, &reply, &changes_);
    if (!changes_.empty()) ++revision_;
    return reply;
  }
  v1::TxnReply Run(const std::vector<v1::KvOp>& ops) {
    v1::TxnRequest request;
    for (const v1::KvOp& op : ops) *request.add_then() = op;
    return Run(request);
  }
  std::string Value(const std::string& key) {
    const auto kv = store_.Find(key);
    return kv == nullptr ? "(absent)" : std::string(kv->value());
  }
  v1::WaitRequest WaitFor(const std::vector<std::string>& keys, int seconds = 10) {
    v1::WaitRequest request;
    for (const std::string& key : keys) request.add_keys(key);
    request.mutable_timeout()->set_seconds(seconds);
    return request;
  }
  std::vector<CallId> Ready() {
    std::vector<KvStore::Ready> ready;
    store_.TakeReady(changes_, &ready);
    std::vector<CallId> calls;
    for (const KvStore::Ready& one : ready) calls.push_back(one.call);
    return calls;
  }

  KvStore store_;
  uint64_t revision_ = 10;
  std::vector<KvChange> changes_;
  std::optional<v1::OpError> error_;
};

TEST_F(KvTest, Put_CountsVersionsAndRevisions) {
  Run({Put("k", "1")});
  Run({Put("k", "2")});
  const auto kv = store_.Find("k");
  EXPECT_EQ(kv->version(), 2u);
  EXPECT_EQ(kv->create_revision(), 11u);
  EXPECT_EQ(kv->mod_revision(), 12u);
}

TEST_F(KvTest, Txn_CompareHolds_DoesThen) {
  v1::TxnRequest request;
  *request.add_compares() = Exists("k", false);
  *request.add_then() = Put("k", "then");
  *request.add_otherwise() = Put("k", "otherwise");
  EXPECT_TRUE(Run(request).succeeded());
  EXPECT_FALSE(Run(request).succeeded());
  EXPECT_EQ(Value("k"), "otherwise");
}

TEST_F(KvTest, Txn_EachTarget_ComparesAsNamed) {
  Run({Put("k", "v")});
  const auto holds = [&](v1::Compare::Target target, const std::string& value, uint64_t number,
                         const std::string& key = "k") {
    v1::TxnRequest request;
    v1::Compare* compare = request.add_compares();
    compare->set_key(key);
    compare->set_target(target);
    compare->set_value(value);
    compare->set_number(number);
    return Run(request).succeeded();
  };
  EXPECT_TRUE(holds(v1::Compare::VALUE, "v", 0));
  EXPECT_FALSE(holds(v1::Compare::VALUE, "w", 0));
  EXPECT_FALSE(holds(v1::Compare::VALUE, "", 0, "absent"));
  EXPECT_TRUE(holds(v1::Compare::VERSION, "", 1));
  EXPECT_TRUE(holds(v1::Compare::VERSION, "", 0, "absent"));
  EXPECT_TRUE(holds(v1::Compare::MOD_REVISION, "", 11));
  EXPECT_FALSE(holds(v1::Compare::MOD_REVISION, "", 12));
  EXPECT_TRUE(holds(v1::Compare::EXISTS, "", 1));
  EXPECT_TRUE(holds(v1::Compare::CREATE_REVISION, "", 11));
  EXPECT_FALSE(holds(v1::Compare::CREATE_REVISION, "", 12));
  EXPECT_TRUE(holds(v1::Compare::CREATE_REVISION, "", 0, "absent"));
  EXPECT_TRUE(holds(v1::Compare::LEASE, "", 0));
  EXPECT_FALSE(holds(v1::Compare::LEASE, "", 0, "absent"));
  v1::KvOp leased = Put("l", "v");
  leased.mutable_put()->set_with_lease(true);
  Run({leased});
  EXPECT_TRUE(holds(v1::Compare::LEASE, "w", 0, "l"));
  EXPECT_FALSE(holds(v1::Compare::LEASE, "x", 0, "l"));
  EXPECT_FALSE(holds(v1::Compare::TARGET_UNSPECIFIED, "", 1));
  EXPECT_EQ(error_->detail().field(), "compares.target");
}

TEST_F(KvTest, Txn_LaterOps_SeeEarlierOnes) {
  const v1::TxnReply reply = Run({Put("k", "1"), Add("k", 4), Get("k"), Delete("k"), Get("k")});
  EXPECT_EQ(reply.results(1).number(), 5);
  EXPECT_EQ(reply.results(2).kvs(0).value(), "5");
  EXPECT_EQ(reply.results(4).kvs_size(), 0);
  EXPECT_TRUE(changes_.empty());  // it ends as it began
}

TEST_F(KvTest, Txn_ErrorInTheMiddle_ChangesNothing) {
  Run({Put("a", "old"), Put("text", "x")});
  Run({Put("a", "new"), Put("b", "new"), Delete("text"), Put("text", "y"), Add("text", 1)});
  ASSERT_TRUE(error_.has_value());
  EXPECT_EQ(error_->detail().field(), "add.key");
  EXPECT_THAT(error_->message(), HasSubstr("not a decimal number"));
  EXPECT_EQ(Value("a"), "old");
  EXPECT_EQ(Value("b"), "(absent)");
  EXPECT_EQ(Value("text"), "x");
  EXPECT_TRUE(changes_.empty());
}

TEST_F(KvTest, Txn_OneKeyTwice_IsOneChange) {
  Run({Put("k", "1"), Put("k", "2")});
  ASSERT_EQ(changes_.size(), 1u);
  EXPECT_TRUE(changes_[0].before == nullptr);
  EXPECT_EQ(changes_[0].after->value(), "2");
}

TEST_F(KvTest, Txn_DeleteThenPut_IsOneChange) {
  Run({Put("k", "1"), Put("other", "1")});
  Run({Delete("k"), Put("other", "2"), Put("k", "2")});
  ASSERT_EQ(changes_.size(), 2u);
  EXPECT_EQ(changes_[0].key(), "k");
  EXPECT_EQ(changes_[0].before->value(), "1");
  EXPECT_EQ(changes_[0].after->value(), "2");
  EXPECT_EQ(changes_[0].after->version(), 1u);
  EXPECT_EQ(changes_[1].key(), "other");
}

TEST_F(KvTest, Add_AbsentCountsAsZeroAndOverflowIsRefused) {
  EXPECT_EQ(Run({Add("n", -3)}).results(0).number(), -3);
  Run({Put("n", "9223372036854775807")});
  Run({Add("n", 1)});
  EXPECT_EQ(error_->detail().field(), "add.delta");
}

TEST_F(KvTest, Append_GrowsUpToTheLimit) {
  EXPECT_EQ(Run({Append("k", "ab")}).results(0).number(), 2);
  EXPECT_EQ(Run({Append("k", "c")}).results(0).number(), 3);
  Run({Append("k", std::string(KvStore::kMaxValue, 'x'))});
  EXPECT_EQ(error_->detail().reason(), v1::ERROR_REASON_LIMIT);
  EXPECT_EQ(Value("k"), "abc");
}

TEST_F(KvTest, Append_ManyToALargeValueInOneTransaction_AreRefused) {
  Run({Put("k", std::string(1'000'000, 'x'))});
  const size_t bytes = store_.bytes();
  Run(std::vector<v1::KvOp>(100, Append("k", "y")));
  ASSERT_TRUE(error_.has_value());
  EXPECT_EQ(error_->detail().reason(), v1::ERROR_REASON_LIMIT);
  EXPECT_TRUE(changes_.empty());
  EXPECT_EQ(store_.bytes(), bytes);
  Run(std::vector<v1::KvOp>(60, Append("k", "y")));
  EXPECT_EQ(error_, std::nullopt);
  EXPECT_EQ(Value("k").size(), 1'000'060u);
}

TEST_F(KvTest, Limits_NameWhatIsTooLarge) {
  Run({Put("", "v")});
  EXPECT_EQ(error_->detail().reason(), v1::ERROR_REASON_BAD_FIELD);
  Run({Put(std::string(1025, 'k'), "v")});
  EXPECT_EQ(error_->detail().field(), "put.key");
  Run({Put("k", std::string(KvStore::kMaxValue + 1, 'v'))});
  EXPECT_EQ(error_->detail().field(), "value");
  Run({Put("k", std::string(KvStore::kMaxValue, 'v'))});
  EXPECT_FALSE(error_.has_value());
  Run(std::vector<v1::KvOp>(KvStore::kMaxOps + 1, Get("k")));
  EXPECT_EQ(error_->detail().field(), "then");
  Run({v1::KvOp()});
  EXPECT_EQ(error_->detail().field(), "kind");
}

TEST_F(KvTest, Get_Prefix_IsOrderedAndCutAtTheLimit) {
  Run({Put("a/2", "2"), Put("a/1", "1"), Put("b", "x"), Put("a/3", "3")});
  v1::KvOp get = Get("a/", true);
  v1::TxnReply reply = Run({get});
  ASSERT_EQ(reply.results(0).kvs_size(), 3);
  EXPECT_EQ(reply.results(0).kvs(0).key(), "a/1");
  get.mutable_get()->set_limit(2);
  get.mutable_get()->set_keys_only(true);
  reply = Run({get});
  EXPECT_EQ(reply.results(0).kvs_size(), 2);
  EXPECT_TRUE(reply.results(0).more());
  EXPECT_EQ(reply.results(0).kvs(0).value(), "");
}

TEST_F(KvTest, Get_LargeValues_AreCutBelowTheMessageLimit) {
  for (int i = 0; i < 8; ++i) Run({Put(std::string(1, 'a' + i), std::string(1 << 20, 'x'))});
  const v1::TxnReply reply = Run({Get("", true)});
  EXPECT_TRUE(reply.results(0).more());
  EXPECT_LT(reply.ByteSizeLong(), 4u << 20);
}

TEST_F(KvTest, Get_Pages_GoOnBehindTheLastKey) {
  Run({Put("a/1", "1"), Put("a/2", "2"), Put("a/3", "3"), Put("b", "x")});
  v1::KvOp get = Get("a/", true);
  get.mutable_get()->set_limit(2);
  get.mutable_get()->set_after("a/2");
  v1::TxnReply reply = Run({get});
  ASSERT_EQ(reply.results(0).kvs_size(), 1);
  EXPECT_EQ(reply.results(0).kvs(0).key(), "a/3");
  EXPECT_FALSE(reply.results(0).more());
  get.mutable_get()->set_after("Z");  // before all of them
  reply = Run({get});
  EXPECT_EQ(reply.results(0).kvs_size(), 2);
  EXPECT_TRUE(reply.results(0).more());
  get.mutable_get()->set_after("b");  // behind all of them
  EXPECT_EQ(Run({get}).results(0).kvs_size(), 0);
}

TEST_F(KvTest, Get_MoreThanOneAnswerHolds_IsRefusedAndNothingIsChanged) {
  Run({Put("large", std::string(1 << 20, 'x')), Put("n", "old")});
  std::vector<v1::KvOp> ops = {Put("n", "new")};
  for (int i = 0; i < KvStore::kMaxOps - 1; ++i) ops.push_back(Get("large"));
  Run(ops);
  ASSERT_TRUE(error_.has_value());
  EXPECT_EQ(error_->detail().reason(), v1::ERROR_REASON_LIMIT);
  EXPECT_EQ(error_->detail().field(), "get.key");
  EXPECT_EQ(Run({Get("n")}).results(0).kvs(0).value(), "old");
}

TEST_F(KvTest, Delete_Prefix_CountsAndSparesOthers) {
  Run({Put("a/1", "x"), Put("a/2", "x"), Put("ab", "x")});
  EXPECT_EQ(Run({Delete("a/", true)}).results(0).number(), 2);
  EXPECT_EQ(Value("ab"), "x");
  EXPECT_EQ(Run({Delete("nothing")}).results(0).number(), 0);
  EXPECT_TRUE(changes_.empty());
}

TEST_F(KvTest, Lease_DropsItsKeysOnly) {
  v1::KvOp put = Put("mine", "x");
  put.mutable_put()->set_with_lease(true);
  Run({put, Put("plain", "x")});
  put.mutable_put()->set_key("taken");
  Run({put});
  Run({Put("taken", "over")});  // by a put without lease
  std::vector<KvChange> changes;
  store_.DropLease("w", &changes);
  ASSERT_EQ(changes.size(), 1u);
  EXPECT_EQ(Value("mine"), "(absent)");
  EXPECT_EQ(Value("plain"), "x");
  EXPECT_EQ(Value("taken"), "over");
}

TEST_F(KvTest, Lease_OnADurableKeyOrWithoutAWorker_IsRefused) {
  v1::KvOp put = Put("k", "x", v1::KV_CLASS_DURABLE);
  put.mutable_put()->set_with_lease(true);
  Run({put});
  EXPECT_EQ(error_->detail().field(), "put.with_lease");
  put.mutable_put()->set_klass(v1::KV_CLASS_EPHEMERAL);
  v1::TxnRequest request;
  *request.add_then() = put;
  Run(request, "");
  EXPECT_EQ(error_->detail().field(), "put.with_lease");
}

TEST_F(KvTest, DropPrefix_SparesOtherKeys) {
  Run({Put("gen/1/a", "x"), Put("gen/1/b", "x", v1::KV_CLASS_DURABLE), Put("gen/2/a", "x")});
  std::vector<KvChange> changes;
  store_.DropPrefix("gen/1/", &changes);
  EXPECT_EQ(changes.size(), 2u);
  EXPECT_EQ(Value("gen/2/a"), "x");
}

TEST_F(KvTest, Wait_AllThere_AnswersAtOnce) {
  Run({Put("a", "1"), Put("b", "2")});
  v1::WaitReply reply;
  EXPECT_TRUE(store_.StartWait(1, WaitFor({"b", "a", "b"}), kStart, &reply));
  EXPECT_EQ(reply.kvs_size(), 3);
  EXPECT_EQ(reply.kvs(0).value(), "2");
}

TEST_F(KvTest, Wait_KeyDeletedBeforeTheLastComes_GoesOn) {
  Run({Put("a", "1")});
  v1::WaitReply reply;
  EXPECT_FALSE(store_.StartWait(1, WaitFor({"a", "b"}), kStart, &reply));
  Run({Delete("a")});
  EXPECT_TRUE(Ready().empty());
  Run({Put("b", "2")});
  EXPECT_TRUE(Ready().empty());
  Run({Put("a", "1")});
  EXPECT_EQ(Ready(), std::vector<CallId>{1});
}

TEST_F(KvTest, Wait_ManyOnOneKey_ShareOneReply) {
  v1::WaitReply reply;
  for (CallId call = 1; call <= 3; ++call) store_.StartWait(call, WaitFor({"k"}), kStart, &reply);
  Run({Put("k", "v")});
  std::vector<KvStore::Ready> ready;
  store_.TakeReady(changes_, &ready);
  ASSERT_EQ(ready.size(), 3u);
  EXPECT_EQ(ready[0].reply, ready[2].reply);
}

TEST_F(KvTest, Wait_ValuesOfMoreThanOneAnswer_AreRefused) {
  const std::string large(1 << 20, 'x');
  std::vector<std::string> keys(5, "large");
  Run({Put("large", large)});
  EXPECT_EQ(store_.CheckWait(WaitFor(keys))->detail().reason(), v1::ERROR_REASON_LIMIT);
  // The size of a value that does not exist yet is unknown.
  Run({Delete("large")});
  EXPECT_FALSE(store_.CheckWait(WaitFor(keys)).has_value());
  v1::WaitReply reply;
  EXPECT_FALSE(store_.StartWait(1, WaitFor(keys), kStart, &reply));
  Run({Put("large", large)});
  std::vector<KvStore::Ready> ready;
  store_.TakeReady(changes_, &ready);
  ASSERT_EQ(ready.size(), 1u);
  EXPECT_EQ(ready[0].reply, nullptr);
  EXPECT_EQ(ready[0].error.detail().reason(), v1::ERROR_REASON_LIMIT);
}

TEST_F(KvTest, Wait_Timeout_NamesTheFirstMissingKey) {
  Run({Put("a", "1")});
  v1::WaitReply reply;
  store_.StartWait(1, WaitFor({"a", "b", "c"}), kStart, &reply);
  EXPECT_EQ(store_.NextDeadline(), kStart + absl::Seconds(10));
  std::vector<KvStore::Ready> ready;
  store_.TakeExpired(kStart + absl::Seconds(10), &ready);
  ASSERT_EQ(ready.size(), 1u);
  EXPECT_THAT(ready[0].error.message(), HasSubstr("\"b\""));
  EXPECT_EQ(store_.NextDeadline(), absl::InfiniteFuture());
}

TEST_F(KvTest, Wait_ThatHasWaited_IsGivenTheRestOfItsTimeout) {
  v1::WaitRequest request = WaitFor({"k"}, 100);
  request.mutable_waited()->set_seconds(60);
  v1::WaitReply reply;
  EXPECT_FALSE(store_.StartWait(1, request, kStart, &reply));
  EXPECT_EQ(store_.NextDeadline(), kStart + absl::Seconds(40));
}

TEST_F(KvTest, Wait_ThatHasWaitedThroughAnOutage_StillHasTheTimeOfALease) {
  store_.HoldFailuresUntil(kStart + absl::Seconds(9));
  v1::WaitRequest request = WaitFor({"k"}, 100);
  request.mutable_waited()->set_seconds(1000);
  v1::WaitReply reply;
  EXPECT_FALSE(store_.StartWait(1, request, kStart, &reply));
  EXPECT_EQ(store_.NextDeadline(), kStart + absl::Seconds(9));
  EXPECT_FALSE(store_.StartWait(2, request, kStart + absl::Seconds(1), &reply));
  EXPECT_EQ(store_.NextDeadline(), kStart + absl::Seconds(9));
  request.mutable_timeout()->set_seconds(5);
  EXPECT_FALSE(store_.StartWait(3, request, kStart, &reply));
  EXPECT_EQ(store_.NextDeadline(), kStart + absl::Seconds(5));
}

TEST_F(KvTest, Wait_Abandoned_IsForgotten) {
  v1::WaitReply reply;
  store_.StartWait(1, WaitFor({"k"}), kStart, &reply);
  store_.AbandonWait(1);
  Run({Put("k", "v")});
  EXPECT_TRUE(Ready().empty());
}

TEST_F(KvTest, Wait_WithoutTimeoutOrKeys_IsRefused) {
  v1::WaitRequest request;
  EXPECT_EQ(store_.CheckWait(request)->detail().field(), "keys");
  request.add_keys("k");
  EXPECT_EQ(store_.CheckWait(request)->detail().reason(), v1::ERROR_REASON_DEADLINE_REQUIRED);
}

TEST_F(KvTest, Writes_TellsReadsFromOthers) {
  v1::TxnRequest request;
  EXPECT_FALSE(KvStore::Writes(request));
  *request.add_compares() = Exists("k", true);
  *request.add_then() = Get("k");
  *request.add_otherwise() = Get("k", true);
  EXPECT_FALSE(KvStore::Writes(request));
  *request.add_otherwise() = Delete("k");
  EXPECT_TRUE(KvStore::Writes(request));
}

TEST_F(KvTest, Reads_TellsBlindWritesFromOthers) {
  v1::TxnRequest request;
  *request.add_then() = Put("k", "v");
  EXPECT_FALSE(KvStore::Reads(request));
  *request.add_then() = Add("k", 1);
  EXPECT_TRUE(KvStore::Reads(request));
}

v1::TxnRequest PutOf(const std::string& key, size_t bytes) {
  v1::TxnRequest request;
  v1::PutOp& put = *request.add_then()->mutable_put();
  put.set_key(key);
  put.set_value(std::string(bytes, 'x'));
  return request;
}

TEST(KvBudget, StoreBeyondIts_RefusesWhatGrowsItAndKeepsTheRest) {
  KvBudget budget{.of_job = 10'000, .of_all = 100'000};
  KvStore store(&budget);
  std::vector<KvChange> changes;
  v1::TxnReply reply;
  EXPECT_FALSE(store.Txn(PutOf("a", 6000), "", 1, &reply, &changes).has_value());
  const size_t used = store.bytes();
  EXPECT_GE(used, 6000u);
  v1::TxnRequest two = PutOf("b", 10);
  *two.add_then() = PutOf("c", 6000).then(0);
  changes.clear();
  const std::optional<v1::OpError> error = store.Txn(two, "", 2, &reply, &changes);
  ASSERT_TRUE(error.has_value());
  EXPECT_EQ(error->code(), static_cast<int>(absl::StatusCode::kResourceExhausted));
  EXPECT_EQ(error->detail().reason(), v1::ERROR_REASON_LIMIT);
  EXPECT_THAT(error->message(), ::testing::HasSubstr("the keys of this job"));
  EXPECT_TRUE(changes.empty());
  EXPECT_EQ(store.Find("b"), nullptr);
  EXPECT_EQ(store.bytes(), used);
  // A write that makes the store smaller is let through, even above the limit.
  budget.of_job = 100;
  EXPECT_FALSE(store.Txn(PutOf("a", 5000), "", 2, &reply, &changes).has_value());
  EXPECT_EQ(budget.used, store.bytes());
}

TEST(KvBudget, AllStoresTogether_AreBoundedAndGiveBackWhatTheyHeld) {
  KvBudget budget{.of_job = 10'000, .of_all = 12'000};
  std::vector<KvChange> changes;
  v1::TxnReply reply;
  KvStore second(&budget);
  {
    KvStore first(&budget);
    EXPECT_FALSE(first.Txn(PutOf("a", 8000), "", 1, &reply, &changes).has_value());
    const std::optional<v1::OpError> error = second.Txn(PutOf("a", 8000), "", 2, &reply, &changes);
    ASSERT_TRUE(error.has_value());
    EXPECT_THAT(error->message(), ::testing::HasSubstr("the keys of all jobs"));
    changes.clear();
  }
  EXPECT_EQ(budget.used, 0u);
  EXPECT_FALSE(second.Txn(PutOf("a", 8000), "", 2, &reply, &changes).has_value());
}

}  // namespace
}  // namespace muster::coordinator
