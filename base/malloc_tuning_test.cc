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

// What the heap has grown by if large pieces are taken and freed with small ones that stay between.
size_t GrowthOfHeap() {
  const size_t before = mallinfo2().arena;
  std::vector<void*> small;
  for (int i = 0; i < kPieces; ++i) {
    void* large = nullptr;
    // As tensors are: what is cut off for the alignment is in the way of the next one.
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
    const FreedMemoryGoesBack outer;
    {
      const FreedMemoryGoesBack inner;
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
  // What the heap has already it uses first.
  malloc_trim(0);
  { const FreedMemoryGoesBack scope; }
  EXPECT_LT(GrowthOfHeap(), kPiece);
}

}  // namespace
}  // namespace muster
