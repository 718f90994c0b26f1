// One suite over every store that process groups may meet through.
#include <functional>
#include <memory>
#include <thread>

#include "ATen/ops/full.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"
#include "worker/process/c10d_comm.h"
#include "worker/process/coordinator_client.h"
#include "worker/process/coordinator_store.h"
#include "worker/process/fake_coordinator.h"
#include "worker/process/process_group.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using Bytes = std::vector<uint8_t>;
using Millis = std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

enum class Kind { kHash, kTcp, kCoordinator };

std::string KindName(const ::testing::TestParamInfo<Kind>& info) {
  return info.param == Kind::kHash ? "Hash" : info.param == Kind::kTcp ? "Tcp" : "Coordinator";
}

class StoreTest : public ::testing::TestWithParam<Kind> {
 protected:
  StoreTest() { store_ = Another(); }

  // One more client of the same store.
  StorePtr Another() {
    switch (GetParam()) {
      case Kind::kHash:
        if (!hash_) hash_ = c10::make_intrusive<c10d::HashStore>();
        return hash_;
      case Kind::kTcp: {
        c10d::TCPStoreOptions options;
        options.port = tcp_ ? tcp_->getPort() : 0;
        options.isServer = !tcp_;
        options.waitWorkers = false;
        auto store = c10::make_intrusive<c10d::TCPStore>("127.0.0.1", options);
        if (!tcp_) tcp_ = store;
        return store;
      }
      case Kind::kCoordinator: {
        if (!fake_) fake_ = std::make_unique<FakeCoordinator>();
        CoordinatorClient::Options options;
        options.address = fake_->address();
        options.job = "job";
        options.worker_id = "w" + std::to_string(++clients_);
        options.heartbeat_period = absl::ZeroDuration();
        auto client = CoordinatorClient::Connect(options);
        EXPECT_TRUE(client.ok()) << client.status();
        return MakeCoordinatorStore(std::shared_ptr<CoordinatorClient>(*std::move(client)),
                                    "gen/1/");
      }
    }
    return nullptr;
  }

  static Bytes B(const std::string& text) { return Bytes(text.begin(), text.end()); }

  std::unique_ptr<FakeCoordinator> fake_;
  c10::intrusive_ptr<c10d::HashStore> hash_;
  c10::intrusive_ptr<c10d::TCPStore> tcp_;
  int clients_ = 0;
  StorePtr store_;
};

INSTANTIATE_TEST_SUITE_P(Every, StoreTest,
                         ::testing::Values(Kind::kHash, Kind::kTcp, Kind::kCoordinator), KindName);

TEST_P(StoreTest, SetGet_BinaryAndOverwritten_SeenByAnother) {
  const Bytes binary = {0, 255, 10, 0};
  store_->set("key", binary);
  EXPECT_EQ(Another()->get("key"), binary);
  store_->set("key", B("later"));
  EXPECT_EQ(store_->get_to_str("key"), "later");
  store_->set("empty", Bytes());
  EXPECT_EQ(store_->get("empty"), Bytes());
}

TEST_P(StoreTest, Add_CountsAndReadsAsDecimal) {
  EXPECT_EQ(store_->add("n", 5), 5);
  EXPECT_EQ(Another()->add("n", -7), -2);
  EXPECT_EQ(store_->get_to_str("n"), "-2");
  EXPECT_EQ(store_->add("n", 0), -2);
}

TEST_P(StoreTest, CompareSet_OnlyFromTheExpectedValue) {
  EXPECT_EQ(store_->compareSet("k", B(""), B("one")), B("one"));
  EXPECT_EQ(store_->compareSet("k", B("zero"), B("two")), B("one"));
  EXPECT_EQ(store_->compareSet("k", B("one"), B("two")), B("two"));
  EXPECT_EQ(store_->get("k"), B("two"));
  EXPECT_EQ(store_->compareSet("absent", B("x"), B("y")), B("x"));
  EXPECT_FALSE(store_->check({"absent"}));
}

TEST_P(StoreTest, DeleteCheckAndCount) {
  const int64_t before = store_->getNumKeys();
  store_->set("a", B("1"));
  store_->set("b", B("2"));
  EXPECT_EQ(store_->getNumKeys(), before + 2);
  EXPECT_TRUE(store_->check({"a", "b"}));
  EXPECT_FALSE(store_->check({"a", "c"}));
  EXPECT_TRUE(store_->deleteKey("a"));
  EXPECT_FALSE(store_->deleteKey("a"));
  EXPECT_FALSE(store_->check({"a"}));
  EXPECT_EQ(store_->getNumKeys(), before + 1);
}

TEST_P(StoreTest, WaitAndGet_BlockUntilAnotherSets) {
  StorePtr other = Another();
  std::thread setter([&] {
    other->wait({"asked"}, Millis(60000));
    other->set("answer", B("42"));
  });
  store_->set("asked", B("?"));
  store_->wait({"asked", "answer"}, Millis(60000));
  EXPECT_EQ(store_->get("answer"), B("42"));
  setter.join();
}

TEST_P(StoreTest, WaitForAKeyThatNeverComes_Throws) {
  EXPECT_ANY_THROW(store_->wait({"never"}, Millis(20)));
  store_->setTimeout(Millis(20));
  EXPECT_EQ(store_->getTimeout(), Millis(20));
  EXPECT_ANY_THROW(store_->get("never"));
  EXPECT_ANY_THROW(store_->wait({"never"}));
  store_->set("after", B("x"));
  EXPECT_EQ(store_->get("after"), B("x")) << "usable after a timeout";
}

TEST_P(StoreTest, ExtendedApi_AppendMultiSetMultiGet) {
  ASSERT_TRUE(store_->hasExtendedApi());
  store_->append("log", B("a"));
  Another()->append("log", B("bc"));
  EXPECT_EQ(store_->get("log"), B("abc"));
  store_->multiSet({"x", "y"}, {B("1"), B("22")});
  EXPECT_THAT(Another()->multiGet({"y", "x", "log"}), ElementsAre(B("22"), B("1"), B("abc")));
}

TEST_P(StoreTest, Clone_IsTheSameStore) {
  StorePtr clone = store_->clone();
  clone->set("from the clone", B("x"));
  EXPECT_EQ(store_->get("from the clone"), B("x"));
}

TEST_P(StoreTest, GlooGroup_MeetsThroughIt) {
  setenv("TORCH_FR_BUFFER_SIZE", "0", 1);
  std::vector<StorePtr> stores = {store_, Another(), Another()};
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      GlooOptions options;
      options.rank = rank;
      options.size = 3;
      options.single_host = true;
      const auto comm = MakeC10dComm(MakeGlooGroup(stores[rank], options));
      at::Tensor x = at::full({1000}, rank);
      comm->AllReduce(x, ReduceOp::kSum);
      EXPECT_EQ(x[999].item<int64_t>(), 3);
    });
  }
  for (auto& thread : threads) thread.join();
}

class CoordinatorStoreTest : public StoreTest {};
INSTANTIATE_TEST_SUITE_P(Only, CoordinatorStoreTest, ::testing::Values(Kind::kCoordinator),
                         KindName);

TEST_P(CoordinatorStoreTest, Errors_NameOperationAndKey) {
  try {
    store_->wait({"never"}, Millis(10));
    ADD_FAILURE() << "must throw";
  } catch (const c10::DistStoreError& e) {
    EXPECT_THAT(e.what(), HasSubstr("coordinator store: wait('never')"));
    EXPECT_THAT(e.what(), HasSubstr("key 'gen/1/never' was not set in time"));
  }
  store_->set("text", B("abc"));
  EXPECT_THROW(store_->add("text", 1), c10::DistStoreError);
}

TEST_P(CoordinatorStoreTest, Prefix_KeepsKeysApart) {
  store_->set("k", B("x"));
  EXPECT_THAT(store_->listKeys(), ElementsAre("k"));
  EXPECT_EQ(store_->getNumKeys(), 1);
}

}  // namespace
}  // namespace muster
