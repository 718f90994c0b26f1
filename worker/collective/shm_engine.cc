#include "worker/collective/shm_engine.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "c10/util/Exception.h"
#include "worker/collective/shm_reduce.h"

namespace muster {
namespace {

// Below this, handing the work to another thread costs more than it hides.
constexpr int64_t kAtOnceBytes = 32 << 10;
// Below this, every rank adds up everything itself instead of meeting a second time.
constexpr int64_t kAddAllBytes = 16 << 10;

class ShmEngine : public CollectiveEngine {
 public:
  ShmEngine(std::unique_ptr<ShmSegment> segment, std::shared_ptr<ShmPool> pool)
      : segment_(std::move(segment)),
        pool_(std::move(pool)),
        rank_(segment_->rank()),
        size_(segment_->size()) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  std::string name() const override { return "muster-shm"; }
  int64_t at_once_bytes() const override { return kAtOnceBytes; }
  void Break(const std::string& why) override { segment_->Break(why); }
  bool allocates() const override { return segment_->reaches_pools(); }
  at::Tensor Allocate(int64_t numel, const at::TensorOptions& options) override {
    return pool_->Allocate(numel, options);
  }

  void AllReduce(char* data, const ShmCall& call, Deadline deadline) override {
    const auto dtype = static_cast<c10::ScalarType>(call.dtype);
    const auto op = static_cast<ShmReduceOp>(call.reduction);
    const auto width = static_cast<int64_t>(c10::elementSize(dtype));
    std::vector<const void*> sources(size_);
    // The part of `bytes` that this rank adds up for all.
    const auto part = [&](int64_t bytes) {
      const int64_t count = bytes / width;
      return std::make_pair(count * rank_ / size_ * width, count * (rank_ + 1) / size_ * width);
    };
    Exchange(
        call, data, call.bytes, ShmSegment::kSlotBytes, deadline,
        [&](const std::vector<char*>& places) {
          const auto [begin, end] = part(call.bytes);
          std::vector<void*> outs(size_);
          for (int r = 0; r < size_; ++r) sources[r] = outs[r] = places[r] + begin;
          ReduceArrays(dtype, op, sources, outs, (end - begin) / width);
        },
        [&](int64_t offset, int64_t bytes) { std::memcpy(segment_->slot(), data + offset, bytes); },
        [&](int64_t offset, int64_t bytes) {
          if (bytes <= kAddAllBytes) {
            for (int r = 0; r < size_; ++r) sources[r] = segment_->slot(r);
            ReduceArrays(dtype, op, sources, {data + offset}, bytes / width);
            return;
          }
          const auto [begin, end] = part(bytes);
          for (int r = 0; r < size_; ++r) sources[r] = segment_->slot(r) + begin;
          ReduceArrays(dtype, op, sources, {segment_->result() + begin}, (end - begin) / width);
          segment_->Meet(deadline, DescribeCall(call));
          std::memcpy(data + offset, segment_->result(), bytes);
        });
  }

  void Broadcast(char* data, const ShmCall& call, Deadline deadline) override {
    const int root = call.root;
    // The others write nothing, so only the place of the root's data matters.
    const ShmPlace mine = rank_ == root ? PlaceOf(data, call.bytes) : ShmPlace();
    ForChunks(call.bytes, ShmSegment::kSlotBytes, [&](int64_t offset, int64_t bytes) {
      segment_->Begin(call, mine);
      if (rank_ == root && !mine) std::memcpy(segment_->slot(), data + offset, bytes);
      MeetAndCompare(call, deadline);
      if (segment_->place(root)) {
        if (rank_ != root) std::memcpy(data, segment_->At(root), call.bytes);
        segment_->Meet(deadline, DescribeCall(call));
        return false;
      }
      if (rank_ != root) std::memcpy(data + offset, segment_->slot(root), bytes);
      return true;
    });
  }

  void AllGather(char* data, const std::vector<char*>& outputs, const ShmCall& call,
                 Deadline deadline) override {
    // The input may lie inside the output.
    const auto copy = [&](int r, int64_t offset, const char* from, int64_t bytes) {
      if (outputs[r] != data) std::memcpy(outputs[r] + offset, from, bytes);
    };
    Exchange(
        call, data, call.bytes, ShmSegment::kSlotBytes, deadline,
        [&](const std::vector<char*>& places) {
          for (int r = 0; r < size_; ++r) copy(r, 0, places[r], call.bytes);
        },
        [&](int64_t offset, int64_t bytes) { std::memcpy(segment_->slot(), data + offset, bytes); },
        [&](int64_t offset, int64_t bytes) {
          for (int r = 0; r < size_; ++r) copy(r, offset, segment_->slot(r), bytes);
        });
  }

  void ReduceScatter(char* in, char* out, const ShmCall& call, Deadline deadline) override {
    const auto dtype = static_cast<c10::ScalarType>(call.dtype);
    const auto op = static_cast<ShmReduceOp>(call.reduction);
    const auto width = static_cast<int64_t>(c10::elementSize(dtype));
    // A slot holds a piece for every rank.
    const int64_t piece = ShmSegment::kSlotBytes / size_ / 64 * 64;
    std::vector<const void*> sources(size_);
    Exchange(
        call, in, call.bytes * size_, piece, deadline,
        [&](const std::vector<char*>& places) {
          for (int r = 0; r < size_; ++r) sources[r] = places[r] + rank_ * call.bytes;
          ReduceArrays(dtype, op, sources, {out}, call.bytes / width);
        },
        [&](int64_t offset, int64_t bytes) {
          for (int r = 0; r < size_; ++r) {
            if (r == rank_) continue;
            std::memcpy(segment_->slot() + r * piece, in + r * call.bytes + offset, bytes);
          }
        },
        [&](int64_t offset, int64_t bytes) {
          for (int r = 0; r < size_; ++r) {
            sources[r] =
                r == rank_ ? in + rank_ * call.bytes + offset : segment_->slot(r) + rank_ * piece;
          }
          ReduceArrays(dtype, op, sources, {out + offset}, bytes / width);
        });
  }

  void Barrier(const ShmCall& call, Deadline deadline) override {
    segment_->Begin(call);
    MeetAndCompare(call, deadline);
  }

 private:
  // Arrives, waits for all, and checks that all are in the same call.
  void MeetAndCompare(const ShmCall& call, Deadline deadline) {
    segment_->Meet(deadline, DescribeCall(call));
    bool same = true;
    for (int r = 0; r < size_; ++r) same = same && segment_->call(r) == segment_->call(0);
    if (same) return;
    std::vector<int> ranks;
    std::vector<ShmCall> calls;
    for (int r = 0; r < size_; ++r) {
      ranks.push_back(r);
      calls.push_back(segment_->call(r));
    }
    TORCH_CHECK(false, DescribeDisagreement(ranks, calls));
  }

  // Calls step(offset, bytes) for each slot's worth in turn, as long as it returns true; once if
  // there is nothing to move.
  template <class Step>
  static void ForChunks(int64_t bytes, int64_t chunk, Step step) {
    int64_t offset = 0;
    do {
      const int64_t n = std::min(chunk, bytes - offset);
      if (!step(offset, n)) return;
      offset += n;
    } while (offset < bytes);
  }

  // The place of `bytes` from `data` for all ranks, if they are worth the search.
  ShmPlace PlaceOf(const char* data, int64_t bytes) {
    if (bytes <= kAddAllBytes || !segment_->all_reach_pools()) return {};
    return pool_->Find(data, static_cast<uint64_t>(bytes));
  }

  // The addresses of every rank's data; this rank's are at `data`.
  std::vector<char*> Everyones(char* data) {
    std::vector<char*> places(size_, data);
    for (int r = 0; r < size_; ++r) {
      if (r != rank_) places[r] = segment_->At(r);
    }
    return places;
  }

  // The steps of a call whose data go through the slots, chunk by chunk, or stay in place if those
  // of every rank are in its pool. put(offset, bytes) writes a chunk to this rank's slot, and
  // take(offset, bytes) reads it from there once all have written; in_place(places) does everything
  // at once, between two meetings.
  template <class InPlace, class Put, class Take>
  void Exchange(const ShmCall& call, char* data, int64_t data_bytes, int64_t chunk,
                Deadline deadline, InPlace in_place, Put put, Take take) {
    const ShmPlace mine = PlaceOf(data, data_bytes);
    bool first = true;
    ForChunks(call.bytes, chunk, [&](int64_t offset, int64_t bytes) {
      if (first && mine) {
        segment_->Begin(call, mine);
      } else {
        segment_->Begin(call);
        put(offset, bytes);
      }
      MeetAndCompare(call, deadline);
      if (first) {
        first = false;
        int placed = 0;
        for (int r = 0; r < size_; ++r) placed += segment_->place(r) ? 1 : 0;
        if (placed == size_) {
          in_place(Everyones(data));
          segment_->Meet(deadline, DescribeCall(call));
          return false;
        }
        if (placed > 0) {
          // Some have written their slot and some have not: start again, with all by slots.
          segment_->Begin(call);
          put(offset, bytes);
          MeetAndCompare(call, deadline);
        }
      }
      take(offset, bytes);
      return true;
    });
  }

  const std::unique_ptr<ShmSegment> segment_;
  const std::shared_ptr<ShmPool> pool_;  // may be null
  const int rank_;
  const int size_;
};

}  // namespace

std::unique_ptr<CollectiveEngine> MakeShmEngine(std::unique_ptr<ShmSegment> segment,
                                                std::shared_ptr<ShmPool> pool) {
  return std::make_unique<ShmEngine>(std::move(segment), std::move(pool));
}

}  // namespace muster
