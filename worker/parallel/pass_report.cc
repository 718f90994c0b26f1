#include "worker/parallel/pass_report.h"

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <utility>

#include "c10/util/Exception.h"
#include "worker/parallel/packed_numbers.h"

namespace muster {
namespace {

constexpr uint32_t kReduces = 1, kStepFollows = 2;
constexpr uint32_t kWritten = 1, kFailed = 2;

const char* TextOfIntention(uint32_t packed) {
  if ((packed & kReduces) == 0) return "only adds gradients up";
  return (packed & kStepFollows) != 0 ? "reduces gradients for an optimizer's step"
                                      : "reduces gradients within an accumulation window";
}

// The numbers before the two lists.
constexpr size_t kHead = 8;

PassReport Unpacked(const std::string& bytes) {
  const std::vector<uint32_t> numbers = Unpack(bytes);
  const auto lists = numbers.begin() + kHead, unused = lists + numbers[7];
  return {.history = numbers[0],
          .events = numbers[1],
          .trained = numbers[2],
          .turns = numbers[3],
          .intention = numbers[4],
          .announced = numbers[5],
          .written = (numbers[6] & kWritten) != 0,
          .failed = (numbers[6] & kFailed) != 0,
          .late = {lists, unused},
          .unused = {unused, numbers.end()}};
}

}  // namespace

uint32_t PassIntention::Packed() const {
  return reduces ? kReduces + (step_follows ? kStepFollows : 0) : 0;
}

void CheckIntentions(const std::vector<uint32_t>& packed) {
  for (size_t rank = 1; rank < packed.size(); ++rank) {
    TORCH_CHECK(packed[rank] == packed[0],
                "the ranks of a sharded model disagree on a backward pass: on rank 0 it ",
                TextOfIntention(packed[0]), ", on rank ", rank, " it ",
                TextOfIntention(packed[rank]),
                "; accumulation windows must end at the same micro-step on every rank: with the "
                "same gradient_accumulation_steps, as many batches, and the same no_sync() and "
                "trigger_sync_in_backward()");
  }
}

void CheckAnnouncements(const std::vector<uint32_t>& announced) {
  for (size_t rank = 1; rank < announced.size(); ++rank) {
    TORCH_CHECK(announced[rank] == announced[0],
                "the ranks of a sharded model have not changed its parameters equally often since "
                "they last compared: rank 0 ",
                announced[0], " times, rank ", rank, " ", announced[rank],
                " times, by optimizer.step(), load_state(), ema.apply() and the like. Each rank "
                "changes its part alone, so this is neither the model of before nor the one of "
                "after: call load_state(), and step, or leave a step out, on all ranks alike");
  }
}

std::string PassReport::Packed() const {
  std::vector<uint32_t> numbers = {history,
                                   events,
                                   trained,
                                   turns,
                                   intention,
                                   announced,
                                   (written ? kWritten : 0) + (failed ? kFailed : 0),
                                   static_cast<uint32_t>(late.size())};
  numbers.insert(numbers.end(), late.begin(), late.end());
  numbers.insert(numbers.end(), unused.begin(), unused.end());
  return Pack(numbers);
}

PassReports::PassReports(const std::vector<std::string>& packed) {
  std::vector<PassReport> all;
  for (const std::string& bytes : packed) all.push_back(Unpacked(bytes));
  const PassReport& first = all.front();
  unused = first.unused;
  for (const PassReport& report : all) {
    same_history = same_history && report.history == first.history && report.events == first.events;
    same_trained = same_trained && report.trained == first.trained;
    same_turns = same_turns && report.turns == first.turns;
    any_written = any_written || report.written;
    any_failed = any_failed || report.failed;
    intentions.push_back(report.intention);
    announced.push_back(report.announced);
    late.insert(late.end(), report.late.begin(), report.late.end());
    std::vector<uint32_t> both;
    std::set_intersection(unused.begin(), unused.end(), report.unused.begin(), report.unused.end(),
                          std::back_inserter(both));
    unused = std::move(both);
  }
  std::sort(late.begin(), late.end());
  late.erase(std::unique(late.begin(), late.end()), late.end());
}

}  // namespace muster
