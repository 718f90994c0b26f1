#ifndef MUSTER_WORKER_TEXT_UNIGRAM_H_
#define MUSTER_WORKER_TEXT_UNIGRAM_H_

#include <memory>

#include "absl/status/statusor.h"
#include "worker/text/model.h"
#include "worker/text/settings.h"

namespace muster::text {

// Makes a model that divides a word into the pieces whose scores (logarithms of probabilities) have
// the largest sum. Scores are added in double from the left; of equal sums the one that was found
// first counts. A character that no piece covers costs the lowest score less 10; neighboring ones
// are one piece. Errors: those of MakeModel.
absl::StatusOr<std::unique_ptr<Model>> MakeUnigram(Settings& settings);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_UNIGRAM_H_
