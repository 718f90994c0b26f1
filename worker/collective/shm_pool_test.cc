#include "worker/collective/shm_pool.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "ATen/ops/empty.h"
#include "ATen/ops/equal.h"
#include "ATen/ops/full.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

std::shared_ptr<ShmPool> NewPool() {
  std::shared_ptr<ShmPool> pool = ShmPool::Create();
  EXPECT_NE(pool, nullptr);
  return pool;
}

std::unique_ptr<ShmPeerPool> PeerOf(const ShmPool& pool) {
  return ShmPeerPool::Open(dup(pool.fd()), pool.nonce());
}

ShmPlace PlaceOf(const ShmPool& pool, const at::Tensor& tensor) {
  return pool.Find(tensor.const_data_ptr(), tensor.nbytes());
}

int64_t BlocksOf(const ShmPool& pool) {
  struct stat status = {};
  EXPECT_EQ(fstat(pool.fd(), &status), 0);
  return status.st_blocks;
}

TEST(ShmPool, Peer_ReadsAndWritesATensorInPlace) {
  const auto pool = NewPool();
  at::Tensor tensor = pool->Allocate(5000, at::kFloat);
  EXPECT_EQ(tensor.sizes(), at::IntArrayRef({5000}));
  tensor.fill_(3);
  const auto peer = PeerOf(*pool);
  ASSERT_NE(peer, nullptr);
  const ShmPlace part = PlaceOf(*pool, tensor.narrow(0, 4000, 10));
  auto* const seen = reinterpret_cast<float*>(peer->At(part));
  EXPECT_EQ(seen[9], 3);
  seen[9] = 4;
  EXPECT_EQ(tensor[4009].item<float>(), 4);
  EXPECT_EQ(peer->mapped(), 1u);
}

TEST(ShmPool, Find_OfOtherMemory_IsNone) {
  const auto pool = NewPool();
  const at::Tensor in = pool->Allocate(10, at::kLong);
  EXPECT_TRUE(PlaceOf(*pool, in));
  EXPECT_FALSE(PlaceOf(*pool, at::empty({10})));
  EXPECT_FALSE(pool->Find(in.const_data_ptr(), 2 * 4096)) << "more than the region";
  EXPECT_FALSE(pool->Find(static_cast<const char*>(in.const_data_ptr()) - 8, 8))
      << "what is before the data is the pool's own";
}

TEST(ShmPool, EndedTensor_GivesItsMemoryBack_AndPeersUnmapIt) {
  const auto pool = NewPool();
  const auto peer = PeerOf(*pool);
  const int64_t before = BlocksOf(*pool);
  at::Tensor first = pool->Allocate(1 << 20, at::kByte);
  peer->At(PlaceOf(*pool, first));
  EXPECT_GE(BlocksOf(*pool), before + 2048);
  at::Tensor view = first.narrow(0, 5, 7);
  first.reset();
  EXPECT_GE(BlocksOf(*pool), before + 2048) << "a view keeps it";
  const ShmPlace old = PlaceOf(*pool, view);
  view.reset();
  EXPECT_EQ(BlocksOf(*pool), before);
  at::Tensor second = pool->Allocate(1 << 20, at::kByte);
  EXPECT_NE(PlaceOf(*pool, second).region, old.region) << "no part of the file is used twice";
  second.fill_(9);
  EXPECT_EQ(*peer->At(PlaceOf(*pool, second)), 9);
  EXPECT_EQ(peer->mapped(), 1u);
}

TEST(ShmPool, Tensor_KeepsItsPool) {
  at::Tensor tensor;
  {
    const auto pool = NewPool();
    tensor = pool->Allocate(100, at::kDouble);
  }
  tensor.fill_(2);
  EXPECT_TRUE(at::equal(tensor, at::full({100}, 2, at::kDouble)));
}

TEST(ShmPool, PoolThatMayNotGrow_SaysSoAndKeepsWhatItHas) {
  const auto pool = NewPool();
  at::Tensor first = pool->Allocate(1000, at::kFloat);
  first.fill_(1);
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 1 << 20;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  EXPECT_FALSE(pool->Allocate(1 << 20, at::kFloat).defined());
  EXPECT_TRUE(pool->Allocate(1 << 10, at::kFloat).defined());
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_TRUE(at::equal(first, at::full({1000}, 1.0F)));
}

TEST(ShmPool, OtherFile_IsNotTakenForAPool) {
  const auto pool = NewPool();
  EXPECT_EQ(ShmPeerPool::Open(dup(pool->fd()), pool->nonce() + 1), nullptr);
  EXPECT_EQ(ShmPeerPool::Open(open("/dev/null", O_RDWR | O_CLOEXEC), pool->nonce()), nullptr);
  EXPECT_EQ(ShmPeerPool::Open(-1, pool->nonce()), nullptr);
}

}  // namespace
}  // namespace muster
