#include "base/malloc_tuning.h"

#include <gtest/gtest.h>
#include <malloc.h>

#include <cstdlib>
#include <cstring>
#include <vector>

namespace muster {
namespace {

constexpr size_t kPiece = size_t{16} << 20;
constexpr int kPieces = 20;

// By how much the heap grows if large pieces are allocated and freed with small ones in between.
size_t GrowthOfHeap() {
  const size_t before = mallinfo2().arena;
  std::vector<void*> small;
  for (int i = 0; i < kPieces; ++i) {
    void* large = nullptr;
    // Aligned like tensors: the space that is cut off for the alignment hinders the next
    // allocation.
    EXPECT_EQ(posix_memalign(&large, 64, kPiece), 0);
    std::memset(large, i + 1, kPiece);
    small.push_back(std::malloc(1000));
    std::free(large);
  }
  const size_t growth = mallinfo2().arena - before;
  for (void* piece : small) std::free(piece);
  return growth;
}

TEST(MallocTuning, FreedMemory_GoesBackWhileAScopeLivesAndForGood) {
  {
    const ScopedGiveBackFreedMemory outer;
    {
      const ScopedGiveBackFreedMemory inner;
      EXPECT_LT(GrowthOfHeap(), kPiece);
    }
    EXPECT_LT(GrowthOfHeap(), kPiece) << "the outer one lives";
    KeepFreedBatchMemory();
    EXPECT_LT(GrowthOfHeap(), kPiece) << "the outer one lives";
  }
  // The malloc of a sanitizer has no such heap.
  if (mallinfo2().arena > 0) {
    EXPECT_GE(GrowthOfHeap(), kPiece) << "kept, as was chosen";
  }
  GiveBackFreedMemory();
  // Otherwise the memory that the heap already has would be used first.
  malloc_trim(0);
  { const ScopedGiveBackFreedMemory scope; }
  EXPECT_LT(GrowthOfHeap(), kPiece);
}

}  // namespace
}  // namespace muster
