// One suite over every store that process groups may meet through: LibTorch's HashStore and
// TCPStore, and Muster's CoordinatorStore on a real coordinator, each plainly and behind a
// c10d::PrefixStore.
#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "ATen/ops/full.h"
#include "absl/time/time.h"
#include "base/defaults.h"
#include "base/mutex.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/store/real_coordinator.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"
#include "worker/collective/c10d_comm.h"
#include "worker/collective/process_group.h"
#include "worker/job/coordinator_client.h"
#include "worker/job/coordinator_store.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;
using Bytes = std::vector<uint8_t>;
using Millis = std::chrono::milliseconds;
using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Long enough that only a store that has lost a call reaches it.
constexpr Millis kLong = std::chrono::minutes(2);
constexpr Millis kShort(20);

Bytes B(const std::string& text) { return Bytes(text.begin(), text.end()); }

void InThreads(int n, const std::function<void(int)>& fn) {
  std::vector<std::thread> threads;
  for (int i = 0; i < n; ++i) threads.emplace_back(fn, i);
  for (auto& thread : threads) thread.join();
}

// A coordinator with `n` workers in seats, each with a connection of its own.
class SeatedWorkers {
 public:
  // The lease is long by default: a busy machine must not cost any worker its seat.
  explicit SeatedWorkers(int n, absl::Duration lease = absl::Minutes(10),
                         absl::Duration outage_tolerance = kDefaultOutageTolerance)
      : clients_(n), seats_(n) {
    InThreads(n, [&](int i) {
      CoordinatorClient::Options options;
      options.address = coordinator_.address();
      options.job = "job";
      options.worker_id = "w" + std::to_string(i);
      options.outage_tolerance = outage_tolerance;
      auto client = CoordinatorClient::Connect(options);
      ASSERT_TRUE(client.ok()) << client.status();
      clients_[i] = *std::move(client);
      JoinOptions join;
      join.min_workers = join.max_workers = n;
      join.preferred_rank = i;
      join.lease = lease;
      const auto seat = clients_[i]->Join(join);
      ASSERT_TRUE(seat.ok()) << seat.status();
      seats_[i] = *seat;
    });
  }

  CoordinatorClient& client(int i) { return *clients_.at(i); }
  const Seat& seat(int i) const { return seats_.at(i); }
  StorePtr Store(int i) { return MakeCoordinatorStore(clients_.at(i), seats_.at(i).key_prefix); }

 private:
  const RealCoordinator coordinator_;
  std::vector<std::shared_ptr<CoordinatorClient>> clients_;
  std::vector<Seat> seats_;
};

enum class Kind { kHash, kTcp, kCoordinator };

// Clients of one store.
class Clients {
 public:
  static constexpr int kMost = 4;

  explicit Clients(Kind kind) : kind_(kind) {
    if (kind == Kind::kHash) hash_ = c10::make_intrusive<c10d::HashStore>();
    if (kind == Kind::kCoordinator) workers_ = std::make_unique<SeatedWorkers>(kMost);
  }

  StorePtr Another() {
    switch (kind_) {
      case Kind::kHash:
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
      case Kind::kCoordinator:
        return workers_->Store(next_++);
    }
    return nullptr;
  }

 private:
  const Kind kind_;
  c10::intrusive_ptr<c10d::HashStore> hash_;
  c10::intrusive_ptr<c10d::TCPStore> tcp_;
  std::unique_ptr<SeatedWorkers> workers_;
  int next_ = 0;
};

using Param = std::tuple<Kind, bool>;

std::string ParamName(const ::testing::TestParamInfo<Param>& info) {
  const auto [kind, prefixed] = info.param;
  const std::string name = kind == Kind::kHash  ? "Hash"
                           : kind == Kind::kTcp ? "Tcp"
                                                : "Coordinator";
  return prefixed ? name + "Prefixed" : name;
}

class StoreTest : public ::testing::TestWithParam<Param> {
 protected:
  StoreTest() : clients_(std::get<0>(GetParam())) {
    store_ = Another();
    store_->setTimeout(kLong);
  }

  // Returns one more client of the same store; Clients::kMost in all.
  StorePtr Another() {
    StorePtr store = clients_.Another();
    if (std::get<1>(GetParam())) store = c10::make_intrusive<c10d::PrefixStore>("prefix", store);
    return store;
  }

  Clients clients_;
  StorePtr store_;
};

INSTANTIATE_TEST_SUITE_P(Every, StoreTest,
                         ::testing::Combine(::testing::Values(Kind::kHash, Kind::kTcp,
                                                              Kind::kCoordinator),
                                            ::testing::Bool()),
                         ParamName);

TEST_P(StoreTest, SetGet_BinaryAndOverwritten_SeenByAnother) {
  const Bytes binary = {0, 255, 10, 0};
  store_->set("key", binary);
  EXPECT_EQ(Another()->get("key"), binary);
  store_->set("key", B("later"));
  EXPECT_EQ(store_->get_to_str("key"), "later");
  store_->set("empty", Bytes());
  EXPECT_EQ(store_->get("empty"), Bytes());
  EXPECT_TRUE(store_->check({"empty"}));
}

TEST_P(StoreTest, Set_EveryByteInKeyAndValue_AndALargeValue) {
  std::string all;
  for (int byte = 0; byte < 256; ++byte) all.push_back(static_cast<char>(byte));
  store_->set(all, B(all));
  StorePtr other = Another();
  EXPECT_EQ(other->get(all), B(all));
  const Bytes large(1 << 19, 0xA5);
  store_->set("large", large);
  EXPECT_EQ(other->get("large"), large);
}

TEST_P(StoreTest, Add_CountsAndReadsAsDecimal) {
  EXPECT_EQ(store_->add("n", 5), 5);
  EXPECT_EQ(Another()->add("n", -7), -2);
  EXPECT_EQ(store_->get_to_str("n"), "-2");
  EXPECT_EQ(store_->add("n", 0), -2);
  store_->set("text", B("41"));
  EXPECT_EQ(store_->add("text", 1), 42);
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
  EXPECT_EQ(store_->add("a", 1), 1) << "a deleted key starts again from 0";
}

TEST_P(StoreTest, Count_OfMoreKeysThanAPageHolds) {
  const int64_t before = store_->getNumKeys();
  for (int first = 0; first < 2500; first += 500) {
    std::vector<std::string> keys;
    for (int i = 0; i < 500; ++i) keys.push_back("many/" + std::to_string(first + i));
    store_->multiSet(keys, std::vector<std::vector<uint8_t>>(keys.size(), {1}));
  }
  EXPECT_EQ(store_->getNumKeys(), before + 2500);
}

TEST_P(StoreTest, WaitAndGet_BlockUntilAnotherSets) {
  StorePtr other = Another();
  std::thread setter([&] {
    other->wait({"asked"}, kLong);
    other->set("answer", B("42"));
  });
  store_->set("asked", B("?"));
  store_->wait({"asked", "answer"}, kLong);
  EXPECT_EQ(store_->get("answer"), B("42"));
  setter.join();
}

TEST_P(StoreTest, Get_WaitsForAddAppendCompareSetAndMultiSetToo) {
  StorePtr other = Another();
  other->setTimeout(kLong);
  std::thread setter([&] {
    other->wait({"go"}, kLong);
    other->add("by add", 1);
    other->append("by append", B("a"));
    other->compareSet("by compareSet", B(""), B("c"));
    other->multiSet({"by multiSet", "and this"}, {B("m"), B("n")});
  });
  store_->set("go", B("!"));
  EXPECT_EQ(store_->get("by add"), B("1"));
  EXPECT_EQ(store_->get("by append"), B("a"));
  EXPECT_EQ(store_->get("by compareSet"), B("c"));
  EXPECT_THAT(store_->multiGet({"and this", "by multiSet"}), ElementsAre(B("n"), B("m")));
  setter.join();
}

TEST_P(StoreTest, WaitForAKeyThatNeverComes_Throws) {
  store_->set("there", B("x"));
  EXPECT_ANY_THROW(store_->wait({"never"}, kShort));
  EXPECT_ANY_THROW(store_->wait({"there", "never"}, kShort));
  store_->setTimeout(kShort);
  EXPECT_EQ(store_->getTimeout(), kShort);
  EXPECT_ANY_THROW(store_->get("never"));
  EXPECT_ANY_THROW(store_->wait({"never"}));
  EXPECT_ANY_THROW(store_->multiGet({"there", "never"}));
  store_->setTimeout(kLong);
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

TEST_P(StoreTest, Clone_IsTheSameStoreUnderTheSamePrefix) {
  StorePtr clone = store_->clone();
  clone->set("from the clone", B("x"));
  EXPECT_EQ(store_->get("from the clone"), B("x"));
}

TEST_P(StoreTest, PrefixStores_KeepKeysApart) {
  c10d::PrefixStore a("a", store_), b("b", Another());
  a.set("k", B("of a"));
  EXPECT_FALSE(b.check({"k"}));
  b.set("k", B("of b"));
  EXPECT_EQ(a.get("k"), B("of a"));
  EXPECT_EQ(b.add("n", 1), 1);
  EXPECT_EQ(a.add("n", 10), 10);
  EXPECT_TRUE(a.deleteKey("k"));
  EXPECT_EQ(b.get("k"), B("of b"));
}

TEST_P(StoreTest, WatchKey_IsRefusedAsEveryStoreDoes) {
  EXPECT_ANY_THROW(store_->watchKey("k", nullptr));
}

TEST_P(StoreTest, ManyClients_NoAddAppendOrCompareSetIsLost) {
  constexpr int kRounds = 100;
  std::vector<StorePtr> stores = {store_};
  while (stores.size() < Clients::kMost) stores.push_back(Another());
  InThreads(Clients::kMost, [&](int i) {
    c10d::Store& store = *stores[i];
    store.setTimeout(kLong);
    for (int round = 0; round < kRounds; ++round) {
      store.add("count", i + 1);
      store.append("log", B(std::to_string(i)));
      // A counter kept with compareSet: the loser of the race tries again.
      const std::string mine = std::to_string(round) + " by " + std::to_string(i);
      Bytes seen = store.compareSet("last", B(""), B(mine));
      while (seen != B(mine)) {
        const Bytes expected = seen;
        seen = store.compareSet("last", expected, B(mine));
      }
      store.add("won", 1);
      // All meet before the next round, as a process group's ranks do.
      if (store.add("arrived/" + std::to_string(round), 1) == Clients::kMost) {
        store.set("released/" + std::to_string(round), B("x"));
      }
      store.wait({"released/" + std::to_string(round)}, kLong);
    }
  });
  EXPECT_EQ(store_->add("count", 0), kRounds * (1 + 2 + 3 + 4));
  EXPECT_EQ(store_->add("won", 0), kRounds * Clients::kMost);
  const std::string log = store_->get_to_str("log");
  for (char client = '0'; client < '0' + Clients::kMost; ++client) {
    EXPECT_EQ(std::count(log.begin(), log.end(), client), kRounds);
  }
}

TEST_P(StoreTest, GlooGroup_MeetsThroughIt) {
  setenv("TORCH_FR_BUFFER_SIZE", "0", 1);
  std::vector<StorePtr> stores = {store_, Another(), Another()};
  InThreads(3, [&](int rank) {
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

// A random script of operations, the same on two stores: they answer alike, also if both refuse.
class Script {
 public:
  Script(unsigned seed, std::vector<std::pair<StorePtr, StorePtr>> clients)
      : random_(seed), clients_(std::move(clients)) {}

  // Runs one operation through one of the clients; the first difference fails the test.
  void Step() {
    const auto& [left, right] = clients_[Below(clients_.size())];
    const auto [text, operation] = Draw();
    script_ += text + "\n";
    const std::string a = Outcome(*left, operation), b = Outcome(*right, operation);
    ASSERT_EQ(a, b) << "after\n" << script_;
  }

 private:
  using Operation = std::function<std::string(c10d::Store&)>;

  size_t Below(size_t bound) {
    return std::uniform_int_distribution<size_t>(0, bound - 1)(random_);
  }
  // Numbers and text live under different keys: what add() makes of text is not part of the
  // contract.
  std::string Key() { return "k" + std::to_string(Below(6)); }
  std::string Number() { return "n" + std::to_string(Below(3)); }
  std::string Any() { return Below(3) == 0 ? Number() : Key(); }
  Bytes Value() {
    static const std::vector<Bytes> values = {B(""), B("a"), B("b"), {0}, {0, 255, '\n'}, B("0")};
    return values[Below(values.size())];
  }

  static std::string Shown(const Bytes& bytes) {
    std::string text = "<";
    for (const uint8_t byte : bytes) text += std::to_string(byte) + " ";
    return text + ">";
  }

  static std::string Outcome(c10d::Store& store, const Operation& operation) {
    std::string outcome = "refused";
    try {
      outcome = operation(store);
    } catch (const c10::DistError&) {
    }
    // TCPStore's clients do not wait for operations that only write: another client's next
    // operation might come first. An answer comes after it.
    store.check({"k0"});
    return outcome;
  }

  std::pair<std::string, Operation> Draw() {
    switch (Below(10)) {
      case 0:
      case 1: {
        const std::string key = Key();
        const Bytes value = Value();
        return {"set " + key + Shown(value), [=](c10d::Store& store) {
                  store.set(key, value);
                  return "done";
                }};
      }
      case 2: {
        const std::string key = Any();
        return {"get " + key, [=](c10d::Store& store) {
                  // A key that exists must come however slow the machine is; one that does not
                  // needs no long wait.
                  store.setTimeout(store.check({key}) ? kLong : Millis(1));
                  return Shown(store.get(key));
                }};
      }
      case 3: {
        const std::string key = Number();
        const int64_t delta = static_cast<int64_t>(Below(7)) - 3;
        return {"add " + key + " " + std::to_string(delta),
                [=](c10d::Store& store) { return std::to_string(store.add(key, delta)); }};
      }
      case 4: {
        const std::string key = Key();
        const Bytes expected = Value(), desired = Value();
        return {"compareSet " + key + Shown(expected) + Shown(desired), [=](c10d::Store& store) {
                  return Shown(store.compareSet(key, expected, desired));
                }};
      }
      case 5: {
        const std::string key = Any();
        return {"delete " + key, [=](c10d::Store& store) {
                  return std::string(store.deleteKey(key) ? "deleted" : "absent");
                }};
      }
      case 6: {
        const std::vector<std::string> keys = {Any(), Any()};
        return {"check " + keys[0] + " " + keys[1],
                [=](c10d::Store& store) { return std::string(store.check(keys) ? "yes" : "no"); }};
      }
      case 7: {
        const std::string key = Key();
        const Bytes value = Value();
        return {"append " + key + Shown(value), [=](c10d::Store& store) {
                  store.append(key, value);
                  return "done";
                }};
      }
      case 8: {
        const std::vector<std::string> keys = {Key(), Key()};
        const std::vector<Bytes> values = {Value(), Value()};
        return {"multiSet " + keys[0] + Shown(values[0]) + " " + keys[1] + Shown(values[1]),
                [=](c10d::Store& store) {
                  store.multiSet(keys, values);
                  return "done";
                }};
      }
      default: {
        const std::vector<std::string> keys = {Any(), Any()};
        return {"multiGet " + keys[0] + " " + keys[1], [=](c10d::Store& store) {
                  store.setTimeout(store.check(keys) ? kLong : Millis(1));
                  const auto values = store.multiGet(keys);
                  return Shown(values.at(0)) + Shown(values.at(1));
                }};
      }
    }
  }

  std::mt19937 random_;
  const std::vector<std::pair<StorePtr, StorePtr>> clients_;
  std::string script_;
};

// Fails the test at the first answer that `kind` and the coordinator give differently.
void CompareOverScripts(Kind kind, unsigned seeds) {
  constexpr int kSteps = 120;
  Clients reference(kind), coordinator(Kind::kCoordinator);
  const std::vector<std::pair<StorePtr, StorePtr>> clients = {
      {reference.Another(), coordinator.Another()}, {reference.Another(), coordinator.Another()}};
  for (unsigned seed = 0; seed < seeds; ++seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    const std::string prefix = "script " + std::to_string(seed);
    std::vector<std::pair<StorePtr, StorePtr>> prefixed;
    for (const auto& [left, right] : clients) {
      prefixed.emplace_back(c10::make_intrusive<c10d::PrefixStore>(prefix, left),
                            c10::make_intrusive<c10d::PrefixStore>(prefix, right));
    }
    Script script(seed, std::move(prefixed));
    for (int step = 0; step < kSteps; ++step) {
      script.Step();
      if (::testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(CoordinatorStore, RandomScripts_AnswerAsTcpStoreDoes) { CompareOverScripts(Kind::kTcp, 4); }

TEST(CoordinatorStore, RandomScripts_AnswerAsHashStoreDoes) { CompareOverScripts(Kind::kHash, 40); }

TEST(CoordinatorStore, Errors_NameOperationAndKey) {
  SeatedWorkers workers(1);
  const StorePtr store = workers.Store(0);
  const auto failure = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const c10::DistStoreError& error) {
      return error.what_without_backtrace();
    }
    return "it did not throw";
  };
  EXPECT_THAT(failure([&] { store->wait({"never"}, kShort); }),
              AllOf(HasSubstr("coordinator store: wait('never')"),
                    HasSubstr("key \"" + workers.seat(0).key_prefix + "never\"")));
  store->set("text", B("abc"));
  EXPECT_THAT(failure([&] { store->add("text", 1); }), HasSubstr("add('text')"));
  EXPECT_EQ(store->get("text"), B("abc"));
  EXPECT_THAT(failure([&] { store->set("too large", Bytes(2 << 20)); }),
              HasSubstr("set('too large')"));
  EXPECT_THAT(failure([&] { store->set(std::string(2000, 'k'), B("x")); }), HasSubstr("1024"));
  EXPECT_THROW(store->queuePush("q", B("x")), c10::Error);
}

TEST(CoordinatorStore, ListKeys_AreThoseOfTheStoreAlone) {
  SeatedWorkers workers(2);
  const StorePtr store = workers.Store(0);
  ASSERT_TRUE(workers.client(1).Set("elsewhere", "x").ok());
  workers.Store(1)->set("k", B("x"));
  store->set("l", B("y"));
  EXPECT_THAT(store->listKeys(), UnorderedElementsAre("k", "l"));
  EXPECT_EQ(store->getNumKeys(), 2);
}

TEST(CoordinatorStore, LeaseRunsOut_WaitersHearThatTheGenerationIsOver) {
  // There is a heartbeat every two seconds. Within the tolerance no worker would be lost: all are
  // silent.
  SeatedWorkers workers(2, absl::Milliseconds(100), absl::ZeroDuration());
  const StorePtr store = workers.Store(0);
  store->setTimeout(kLong);
  EXPECT_THROW(store->get("never"), c10::DistStoreError);
  EXPECT_THROW(store->set("k", B("x")), c10::DistStoreError);
}

TEST(CoordinatorClient, BarrierThatOneRankMisses_NamesIt_NextOneWorks) {
  SeatedWorkers workers(2);
  Notification failed;
  InThreads(2, [&](int rank) {
    CoordinatorClient& client = workers.client(rank);
    const auto passed = client.Barrier("b", absl::Minutes(1), "r" + std::to_string(rank));
    ASSERT_TRUE(passed.ok()) << passed.status();
    EXPECT_THAT(passed->payloads, ElementsAre("r0", "r1"));
    if (rank == 0) {
      const auto result = client.Barrier("b", absl::Milliseconds(100));
      EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded);
      EXPECT_THAT(std::string(result.status().message()),
                  AllOf(HasSubstr("barrier 'b'"), HasSubstr("rank 1")));
      failed.Notify();
    } else {
      failed.WaitForNotification();
      EXPECT_FALSE(client.Barrier("b", absl::Minutes(1)).ok()) << "the late one hears the same";
    }
    EXPECT_TRUE(client.Barrier("b", absl::Minutes(1)).ok());
  });
}

TEST(CoordinatorClient, Peers_AreInRankOrder) {
  SeatedWorkers workers(3);
  const auto peers = workers.client(2).Peers();
  ASSERT_TRUE(peers.ok()) << peers.status();
  ASSERT_EQ(peers->size(), 3u);
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ((*peers)[rank].rank, rank);
    EXPECT_EQ((*peers)[rank].worker_id, "w" + std::to_string(rank));
  }
}

}  // namespace
}  // namespace muster
