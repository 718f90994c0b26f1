#include "worker/models/beam_search.h"

#include <algorithm>
#include <cmath>
#include <utility>

namespace muster::models {

Beams::Beams(const GenerateOptions& options, std::vector<int64_t> end_tokens)
    : options_(options), end_tokens_(std::move(end_tokens)), running_(1) {}

int64_t Beams::num_candidates() const {
  // So many that num_beams can run on even if every end token is among them.
  return options_.num_beams * std::max<int64_t>(2, 1 + static_cast<int64_t>(end_tokens_.size()));
}

bool Beams::is_done() const {
  return is_closed_ || running_.empty() || length_ == options_.max_new_tokens ||
         (options_.early_stopping == EarlyStopping::kWhenFull && is_full());
}

std::vector<int64_t> Beams::Step(const std::vector<Candidate>& candidates) {
  ++length_;
  std::vector<Sequence> next;
  std::vector<int64_t> parents;
  for (size_t i = 0; i < candidates.size(); ++i) {
    const Candidate& candidate = candidates[i];
    const bool has_ended =
        length_ == options_.max_new_tokens ||
        std::find(end_tokens_.begin(), end_tokens_.end(), candidate.token) != end_tokens_.end();
    const bool runs_on = !has_ended && static_cast<int64_t>(next.size()) < options_.num_beams;
    const bool may_finish = has_ended && static_cast<int64_t>(i) < options_.num_beams;
    if (!runs_on && !may_finish) continue;
    Sequence sequence = {.tokens = running_[candidate.beam].tokens, .score = candidate.sum};
    sequence.tokens.push_back(candidate.token);
    if (runs_on) {
      next.push_back(std::move(sequence));
      parents.push_back(candidate.beam);
    } else {
      Finish(std::move(sequence));
    }
  }
  running_ = std::move(next);
  KeepBestFinished();
  CloseIfHopeless();
  return parents;
}

void Beams::Finish(Sequence sequence) {
  if (is_closed_) return;
  sequence.score /= std::pow(static_cast<double>(length_), options_.length_penalty);
  pending_.push_back(std::move(sequence));
}

void Beams::KeepBestFinished() {
  std::vector<Sequence> pending = std::exchange(pending_, {});
  if (options_.early_stopping == EarlyStopping::kWhenFull && is_full()) return;
  for (Sequence& sequence : pending) finished_.push_back(std::move(sequence));
  // Stable: of equals the earlier stays.
  std::stable_sort(finished_.begin(), finished_.end(),
                   [](const Sequence& a, const Sequence& b) { return a.score > b.score; });
  if (static_cast<int64_t>(finished_.size()) > options_.num_beams) {
    finished_.resize(options_.num_beams);
  }
}

void Beams::CloseIfHopeless() {
  if (!is_full() || running_.empty()) return;
  // The longest that the best running sequence may become counts where length is rewarded.
  const bool at_best =
      options_.early_stopping == EarlyStopping::kNever && options_.length_penalty > 0;
  const double length = static_cast<double>(at_best ? options_.max_new_tokens : length_);
  double best = running_.front().score;
  for (const Sequence& sequence : running_) best = std::max(best, sequence.score);
  if (best / std::pow(length, options_.length_penalty) <= finished_.back().score) is_closed_ = true;
}

}  // namespace muster::models
