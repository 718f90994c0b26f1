#include "worker/models/beam_search.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

namespace muster::models {

Beams::Beams(const GenerateOptions& options, std::vector<int64_t> end_tokens)
    : options_(options), end_tokens_(std::move(end_tokens)), running_(1) {}

int64_t Beams::num_candidates() const {
  // Enough for num_beams sequences to continue even if every end token is among the candidates.
  return options_.num_beams * std::max<int64_t>(2, 1 + static_cast<int64_t>(end_tokens_.size()));
}

bool Beams::is_done() const {
  return is_closed_ || running_.empty() || length_ == options_.max_new_tokens ||
         (options_.early_stopping == EarlyStopping::kWhenFull && is_full());
}

bool Beams::HasEnded(const Sequence& sequence) const {
  return length_ == options_.max_new_tokens ||
         std::find(end_tokens_.begin(), end_tokens_.end(), sequence.tokens.back()) !=
             end_tokens_.end() ||
         (options_.ends_row != nullptr && options_.ends_row(sequence.tokens));
}

std::vector<int64_t> Beams::Step(const std::vector<Candidate>& candidates) {
  ++length_;
  const auto num_beams = static_cast<size_t>(options_.num_beams);
  // Checking whether a candidate ends is not free, and only matters if it may be a result or
  // continue.
  std::vector<size_t> best(candidates.size());
  std::iota(best.begin(), best.end(), size_t{0});
  std::stable_sort(best.begin(), best.end(), [&candidates](size_t a, size_t b) {
    return candidates[a].sum > candidates[b].sum;
  });
  std::vector<Sequence> next;
  std::vector<int64_t> parents;
  for (const size_t i : best) {
    const bool may_run_on = next.size() < num_beams;
    if (!may_run_on && i >= num_beams) continue;
    const Candidate& candidate = candidates[i];
    Sequence sequence = {.tokens = running_[candidate.beam].tokens, .score = candidate.sum};
    sequence.tokens.push_back(candidate.token);
    if (!HasEnded(sequence)) {
      if (!may_run_on) continue;
      next.push_back(std::move(sequence));
      parents.push_back(candidate.beam);
    } else if (i < num_beams) {
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
  // The sort is stable: of equal scores the earlier one stays first.
  std::stable_sort(finished_.begin(), finished_.end(),
                   [](const Sequence& a, const Sequence& b) { return a.score > b.score; });
  if (static_cast<int64_t>(finished_.size()) > options_.num_beams) {
    finished_.resize(options_.num_beams);
  }
}

void Beams::CloseIfHopeless() {
  if (!is_full() || running_.empty()) return;
  // If length is rewarded, compare the score at the greatest length that the best running sequence
  // may reach.
  const bool at_best =
      options_.early_stopping == EarlyStopping::kNever && options_.length_penalty > 0;
  const double length = static_cast<double>(at_best ? options_.max_new_tokens : length_);
  double best = running_.front().score;
  for (const Sequence& sequence : running_) best = std::max(best, sequence.score);
  if (best / std::pow(length, options_.length_penalty) <= finished_.back().score) is_closed_ = true;
}

}  // namespace muster::models
