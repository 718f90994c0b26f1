#ifndef MUSTER_WORKER_MODELS_BEAM_SEARCH_H_
#define MUSTER_WORKER_MODELS_BEAM_SEARCH_H_

#include <cstdint>
#include <vector>

#include "worker/models/generate.h"

namespace muster::models {

// Beam search over one row, without the model: which sequences continue and which have ended. Pure.
class Beams {
 public:
  // A token that may follow a running sequence.
  struct Candidate {
    int64_t beam = 0;
    int64_t token = 0;
    // The sum of the scores of the sequence with this token.
    double sum = 0;
  };
  struct Sequence {
    std::vector<int64_t> tokens;
    // For a running sequence the sum, for a finished one the sum over length^length_penalty.
    double score = 0;
  };

  // `end_tokens`: as resolved from options and config.
  Beams(const GenerateOptions& options, std::vector<int64_t> end_tokens);

  // The number of candidates that Step() needs.
  int64_t num_candidates() const;
  // At first one sequence without tokens; then num_beams, or fewer if rules leave fewer candidates
  // or more of them end. Best first.
  const std::vector<Sequence>& running() const { return running_; }
  // Takes num_candidates() tokens after the running sequences: the best, best first, or as they
  // were drawn. Sequences among the first num_beams that end become results. Returns for each
  // sequence that continues the index of the one that it extends.
  std::vector<int64_t> Step(const std::vector<Candidate>& candidates);
  bool is_done() const;
  // Best first.
  const std::vector<Sequence>& finished() const { return finished_; }

 private:
  bool is_full() const { return static_cast<int64_t>(finished_.size()) == options_.num_beams; }
  bool HasEnded(const Sequence& sequence) const;
  void Finish(Sequence sequence);
  void KeepBestFinished();
  void CloseIfHopeless();

  const GenerateOptions options_;
  const std::vector<int64_t> end_tokens_;
  int64_t length_ = 0;
  bool is_closed_ = false;
  std::vector<Sequence> running_;
  std::vector<Sequence> finished_;
  // The sequences that ended in the current step.
  std::vector<Sequence> pending_;
};

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_BEAM_SEARCH_H_
