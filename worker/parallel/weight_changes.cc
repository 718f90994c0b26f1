#include "worker/parallel/weight_changes.h"

namespace muster {
namespace {

thread_local uint64_t changes = 0;

}  // namespace

uint64_t WeightChanges() { return changes; }

void NoteWeightChange() { ++changes; }

}  // namespace muster
