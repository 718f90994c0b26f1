#ifndef MUSTER_COORDINATOR_FREE_IF_LARGE_H_
#define MUSTER_COORDINATOR_FREE_IF_LARGE_H_

#include <cstddef>

namespace muster::coordinator {

// Frees the memory that an empty map keeps for its former entries: at a rendezvous all ranks wait
// at the same time.
template <typename Map>
void FreeIfLarge(Map* map) {
  constexpr size_t kLarge = 4096;
  if (map->empty() && map->capacity() > kLarge) map->rehash(0);
}

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_FREE_IF_LARGE_H_
