#include "worker/train/batch_size_finder.h"

#include <algorithm>
#include <cctype>
#include <exception>
#include <limits>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Context.h"
#include "base/log.h"
#include "c10/core/CachingDeviceAllocator.h"
#include "c10/util/Exception.h"
#include "worker/collective/comm_checks.h"
#include "worker/collective/on_all.h"

namespace muster {

bool IsOutOfMemory(const std::exception& error) {
  // An earlier lack of memory has left parameters that no batch size can train.
  if (std::string(error.what()).find("call load_state()") != std::string::npos) return false;
  if (dynamic_cast<const c10::OutOfMemoryError*>(&error) != nullptr ||
      dynamic_cast<const std::bad_alloc*>(&error) != nullptr) {
    return true;
  }
  std::string text = error.what();
  std::transform(text.begin(), text.end(), text.begin(),
                 [](unsigned char c) { return std::tolower(c); });
  for (const char* words :
       {"out of memory", "can't allocate memory", "cublas_status_alloc_failed",
        "cudnn_status_alloc_failed", "cudnn error: cudnn_status_not_supported"}) {
    if (text.find(words) != std::string::npos) return true;
  }
  return false;
}

int64_t FindExecutableBatchSize(Comm& comm, const BatchSizeOptions& options,
                                const std::function<void(int64_t)>& attempt) {
  int64_t size = options.starting_batch_size, before = std::numeric_limits<int64_t>::max();
  while (true) {
    // Each rank has computed the size independently, and ranks with another one would run something
    // else.
    std::vector<std::string> sizes = comm.AllGatherBytes(std::to_string(size));
    const bool same = std::equal(sizes.begin() + 1, sizes.end(), sizes.begin());
    TORCH_CHECK(same, "find_executable_batch_size(): ",
                comm_checks::ByRanks(sizes, "tries batch size", "try batch size"),
                "; start with the same size on every process, and reduce it alike");
    TORCH_CHECK(size < before, "the function that reduces the batch size turned ", before, " into ",
                size);
    TORCH_CHECK(size > 0, "no executable batch size found, reached zero");
    if (before != std::numeric_limits<int64_t>::max()) {
      MUSTER_LOG(Warning) << "batch size " << before << " runs out of memory: trying " << size;
    }
    // The result on this rank: "" fits, "m" out of memory, "e..." anything else.
    std::string mine;
    std::exception_ptr failure;
    try {
      attempt(size);
    } catch (const std::exception& error) {
      if (IsOutOfMemory(error)) {
        mine = "m";
      } else {
        failure = std::current_exception();
      }
    } catch (...) {
      failure = std::current_exception();
    }
    if (failure != nullptr) mine = "e" + TextOf(failure);
    const std::vector<std::string> all = comm.AllGatherBytes(mine);
    if (failure != nullptr) std::rethrow_exception(failure);
    bool fits = true;
    for (size_t rank = 0; rank < all.size(); ++rank) {
      TORCH_CHECK(all[rank].empty() || all[rank][0] == 'm', "trying batch size ", size,
                  " failed on rank ", rank, ": ", all[rank].substr(1));
      fits = fits && all[rank].empty();
    }
    if (fits) return size;
    before = std::exchange(size, options.reduce ? options.reduce(size) : size * 9 / 10);
    if (options.forget && size > 0) options.forget();
    if (at::hasCUDA()) at::getDeviceAllocator(c10::kCUDA)->emptyCache();
  }
}

}  // namespace muster
