#include "worker/parallel/weight_changes.h"

#include <atomic>

namespace muster {
namespace {

std::atomic<uint64_t> changes{0};

}  // namespace

uint64_t WeightChanges() { return changes; }

void NoteWeightChange() { ++changes; }

}  // namespace muster
