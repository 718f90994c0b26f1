#ifndef MUSTER_WORKER_TEXT_BPE_H_
#define MUSTER_WORKER_TEXT_BPE_H_

#include <memory>

#include "absl/status/statusor.h"
#include "worker/text/model.h"
#include "worker/text/settings.h"

namespace muster::text {

// Byte pair encoding: a word begins as its characters; the pair of neighbors that was learned first
// becomes one token, until there is none. Errors: as MakeModel.
absl::StatusOr<std::unique_ptr<Model>> MakeBpe(Settings& settings);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_BPE_H_
