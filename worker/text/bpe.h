#ifndef MUSTER_WORKER_TEXT_BPE_H_
#define MUSTER_WORKER_TEXT_BPE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "worker/text/model.h"
#include "worker/text/settings.h"

namespace muster::text {

// Makes a model of byte pair encoding: a word begins as its characters; then the pair of neighbors
// that was learned first becomes one token, until there is no such pair. Errors: those of
// MakeModel.
absl::StatusOr<std::unique_ptr<Model>> MakeBpe(Settings& settings);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_BPE_H_
