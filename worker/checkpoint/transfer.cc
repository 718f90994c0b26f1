#include "worker/checkpoint/transfer.h"

#include <algorithm>

#include "ATen/Parallel.h"

namespace muster {

int TransferThreads() { return std::clamp(at::get_num_threads(), 2, 8); }

int ReadingThreads() { return 2 * TransferThreads(); }

}  // namespace muster
