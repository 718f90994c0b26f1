#include "worker/collective/hosts_engine.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/Backend.hpp"
#include "worker/collective/host_links.h"
#include "worker/collective/shm_reduce.h"

namespace muster {
namespace {

using Clock = std::chrono::steady_clock;
using Message = HostLinks::Message;

// How much of the data of all ranks is processed at a time: as much as the stages hold or, if no
// rank needs a stage, enough to hide the meetings between two chunks.
constexpr int64_t kChunkBytes = kHostStageBytes / 2;
constexpr int64_t kLoneChunkBytes = int64_t{16} << 20;
// The size of one message, so that the next is under way while one is added up or passed on.
constexpr int64_t kPieceBytes = 256 << 10;
// Up to this much data of a host is sent inside the frames that identify the call: one message, and
// no second meeting.
constexpr int64_t kInlineBytes = 4 << 10;
// Ranks of a host notice a missing rank before other hosts do, so that the first error names it.
constexpr std::chrono::milliseconds kGrace{500};

// The message that ranks send to their peers at the beginning of a call.
struct Frame {
  ShmCall call;
  int32_t failed = 0;  // the ranks of this host disagree, as `data` says
  int32_t rank = 0;
  char data[kInlineBytes];
};

// A call of this rank.
struct Turn {
  const ShmCall& call;
  const Clock::time_point deadline;
  const std::string what;
  bool agreed;     // all hosts are in this call
  bool disagreed;  // the error reports that ranks or hosts disagree
  // Messages that may not have been sent completely.
  std::vector<Message> sends;
  // The size of a message of the ring: the same on every host.
  int64_t piece;

  Clock::time_point links_deadline() const { return deadline + kGrace; }
};

// One lane's part in the reduction of a chunk.
struct LaneSums {
  int lane = 0;
  const Lane* of = nullptr;
  // For the range that host h adds up: the number of its elements, and their addresses on each rank
  // of this host.
  std::vector<int64_t> counts;
  std::vector<std::vector<const char*>> sources;
  // Where the sums of this host's own range are written.
  std::vector<char*> outs;
  // The sums that arrive from other hosts: by host, and their addresses.
  std::vector<std::vector<Message>> arrivals;
  std::vector<char*> arrived;
};

// A block that goes around the ring of hosts, on one lane.
struct Block {
  int lane = 0;
  char* data = nullptr;
  int64_t bytes = 0;
  bool forward = false;  // the next host does not have it yet
  std::vector<Message> pieces;
};

class HostsEngine : public CollectiveEngine {
 public:
  HostsEngine(const HostLayout& layout, int rank, c10::intrusive_ptr<c10d::Backend> gloo,
              HostMemory memory)
      : layout_(layout),
        lanes_(MakeLanes(layout_)),
        rank_(rank),
        host_(layout_.host_of[rank]),
        hosts_(static_cast<int>(layout_.hosts.size())),
        local_(layout_.local_of[rank]),
        locals_(layout_.ranks_on(host_)),
        memory_(std::move(memory)),
        segment_(memory_.segment.get()),
        links_(std::move(gloo), rank, Peers(layout_, lanes_, rank)),
        places_(locals_),
        staged_(locals_),
        stages_(locals_),
        frames_(links_.peers().size()),
        frame_of_host_(hosts_) {
    for (size_t i = 0; i < lanes_.size(); ++i) {
      if (lanes_[i].ranks[host_] == rank_) my_lanes_.push_back(static_cast<int>(i));
    }
    for (size_t i = frames_.size(); i-- > 0;) {
      frame_of_host_[layout_.host_of[links_.peers()[i]]] = &frames_[i];
    }
    frame_of_host_[host_] = &frame_;
    std::memset(frame_.data, 0, sizeof(frame_.data));
  }

  // Makes the stages of this host's ranks known to each other.
  void OpenStages(Deadline deadline) {
    if (segment_ == nullptr) return;
    stage_ = static_cast<char*>(memory_.stage.data_ptr());
    stage_place_ = memory_.pool->Find(stage_, kHostStageBytes);
    segment_->Begin({}, stage_place_);
    segment_->Meet(deadline, "sharing memory");
    for (int i = 0; i < locals_; ++i) stages_[i] = i == local_ ? stage_ : segment_->At(i);
    segment_->Meet(deadline, "sharing memory");
  }

  int rank() const override { return rank_; }
  int size() const override { return layout_.size(); }
  std::string name() const override { return "muster-hosts"; }
  // No operation runs at once: another host may be waiting for a rank that calls without waiting.
  int64_t at_once_bytes() const override { return -1; }
  void Break(const std::string& why) override {
    if (segment_ != nullptr) segment_->Break(why);
    links_.Break(why);
  }
  bool allocates() const override { return segment_ != nullptr; }
  at::Tensor Allocate(int64_t numel, const at::TensorOptions& options) override {
    return memory_.pool->Allocate(numel, options);
  }

  void AllReduce(char* data, const ShmCall& call, Deadline deadline) override {
    Take(call, deadline, [&](Turn& turn) {
      const Kind kind(call);
      const int64_t count = call.bytes / kind.width;
      if (count * kind.wide_width <= kInlineBytes) {
        SumAtOnce(turn, kind, data, count);
        CombineAtOnce(kind, 0, count, data);
        return;
      }
      turn.piece = kind.piece() * kind.width;
      const ShmPlace placed = PlaceOf(data, call.bytes);
      ForChunks(count, chunk_bytes_ / kind.wide_width, [&](int64_t begin, int64_t n) {
        const bool staged = MustStage(placed);
        if (staged) std::memcpy(stage_, data + begin * kind.width, n * kind.width);
        MeetWithData(turn, placed, data);
        AllReduceChunk(turn, kind, begin, n);
        MeetAgain(turn);
        if (staged) std::memcpy(data + begin * kind.width, stage_, n * kind.width);
      });
    });
  }

  void ReduceScatter(char* input, char* output, const ShmCall& call, Deadline deadline) override {
    Take(call, deadline, [&](Turn& turn) {
      const Kind kind(call);
      const int64_t part = call.bytes / kind.width;
      if (part * size() * kind.wide_width <= kInlineBytes) {
        SumAtOnce(turn, kind, input, part * size());
        CombineAtOnce(kind, part * rank_, part, output);
        return;
      }
      const ShmPlace placed = PlaceOf(input, call.bytes * size());
      const int64_t chunk = std::max<int64_t>(1, chunk_bytes_ / kind.wide_width / size());
      ForChunks(part, chunk, [&](int64_t begin, int64_t n) {
        if (MustStage(placed)) {
          for (int r = 0; r < size(); ++r) {
            std::memcpy(stage_ + r * n * kind.width, input + (r * part + begin) * kind.width,
                        n * kind.width);
          }
        }
        MeetWithData(turn, placed, input);
        std::vector<LaneSums> sums = NewSums();
        for (LaneSums& lane : sums) {
          for (int h = 0; h < hosts_; ++h) {
            const int r = lane.of->ranks[h];
            const auto [first, last] = WithinPart(*lane.of, h, n);
            lane.counts[h] = last - first;
            for (int i = 0; i < locals_; ++i) {
              lane.sources[h].push_back(places_[i] +
                                        (staged_[i] ? r * n + first : r * part + begin + first) *
                                            kind.width);
            }
            if (h == host_) lane.outs = {output + (begin + first) * kind.width};
          }
        }
        ExpectSums(turn, kind, &sums);
        SendSums(turn, kind, sums);
        for (LaneSums& lane : sums) Combine(turn, kind, lane, [](int64_t, int64_t) {});
        WaitForSends(turn);
        MeetAgain(turn);
      });
    });
  }

  void AllGather(char* input, const std::vector<char*>& outputs, const ShmCall& call,
                 Deadline deadline) override {
    Take(call, deadline, [&](Turn& turn) {
      const int64_t bytes = call.bytes;
      if (bytes * MostRanks() <= kInlineBytes) return AllGatherAtOnce(turn, input, outputs, bytes);
      const ShmPlace placed = PlaceOf(input, bytes);
      ForChunks(bytes, std::max<int64_t>(1, chunk_bytes_ / size()), [&](int64_t begin, int64_t n) {
        if (MustStage(placed)) std::memcpy(stage_, input + begin, n);
        MeetWithData(turn, placed, input);
        GatherChunk(turn, input, outputs, begin, n);
      });
      // Stages are read until here, and are freed with the group.
      MeetAgain(turn);
    });
  }

  void Broadcast(char* data, const ShmCall& call, Deadline deadline) override {
    Take(call, deadline, [&](Turn& turn) {
      if (call.bytes <= kInlineBytes) return BroadcastAtOnce(turn, data);
      const ShmPlace placed = PlaceOf(data, call.bytes);
      const int root_host = layout_.host_of[call.root];
      ForChunks(call.bytes, chunk_bytes_, [&](int64_t begin, int64_t n) {
        const bool staged = MustStage(placed);
        if (staged && rank_ == call.root) std::memcpy(stage_, data + begin, n);
        MeetWithData(turn, placed, data);
        const auto at = [&](int i) { return places_[i] + (staged_[i] ? 0 : begin); };
        if (host_ == root_host) {
          const char* const from = at(layout_.local_of[call.root]);
          for (const int lane : my_lanes_) {
            const auto [first, last] = lanes_[lane].Of(n);
            SendPieces(turn, lane, from + first, last - first);
          }
          if (rank_ != call.root) std::memcpy(data + begin, from, n);
        } else {
          std::vector<Block> blocks;
          for (const int lane : my_lanes_) {
            const auto [first, last] = lanes_[lane].Of(n);
            blocks.push_back({lane, at(local_) + first, last - first, Next() != root_host, {}});
          }
          Expect(turn, &blocks);
          PassOn(turn, &blocks, [&](const Block& block, int64_t from, int64_t length) {
            const char* const piece = block.data + from;
            for (int i = 0; i < locals_; ++i) {
              if (i != local_) std::memcpy(at(i) + (piece - at(local_)), piece, length);
            }
          });
        }
        WaitForSends(turn);
        MeetAgain(turn);
        if (staged && host_ != root_host) std::memcpy(data + begin, stage_, n);
      });
    });
  }

  void Barrier(const ShmCall& call, Deadline deadline) override {
    Take(call, deadline, [&](Turn& turn) {
      if (segment_ != nullptr) segment_->Begin(call);
      MeetHost(turn);
      MeetHosts(turn);
    });
  }

 private:
  // The dtype and the operation of a reduction.
  struct Kind {
    explicit Kind(const ShmCall& call)
        : dtype(static_cast<c10::ScalarType>(call.dtype)),
          op(static_cast<ShmReduceOp>(call.reduction)),
          width(static_cast<int64_t>(c10::elementSize(dtype))),
          wide_width(static_cast<int64_t>(c10::elementSize(WideType(dtype)))) {}
    const c10::ScalarType dtype;
    const ShmReduceOp op;
    const int64_t width;
    const int64_t wide_width;
    int64_t piece() const { return kPieceBytes / wide_width; }
  };

  static std::vector<int> Peers(const HostLayout& layout, const std::vector<Lane>& lanes,
                                int rank) {
    std::set<int> peers;
    for (const Lane& lane : lanes) {
      if (lane.ranks[layout.host_of[rank]] == rank) {
        peers.insert(lane.ranks.begin(), lane.ranks.end());
      }
    }
    peers.erase(rank);
    return {peers.begin(), peers.end()};
  }

  // Calls step(begin, n) for each chunk of `count` in turn; once if there are none.
  template <class Step>
  static void ForChunks(int64_t count, int64_t chunk, Step step) {
    int64_t begin = 0;
    do {
      const int64_t n = std::min(chunk, count - begin);
      step(begin, n);
      begin += n;
    } while (begin < count);
  }

  // The tags of the two directions of a lane, and of frames.
  static int SumTag(int lane) { return 2 * lane; }
  static int RingTag(int lane) { return 2 * lane + 1; }
  static constexpr int kFrameTag = HostLinks::kTags - 1;

  int Next() const { return (host_ + 1) % hosts_; }
  int Before(int hosts) const { return (host_ - hosts + hosts_) % hosts_; }
  int MostRanks() const {
    size_t most = 0;
    for (const auto& ranks : layout_.hosts) most = std::max(most, ranks.size());
    return static_cast<int>(most);
  }
  // Whether host h sends sums of several ranks, which are in the wide type.
  bool SendsWide(int h) const { return layout_.ranks_on(h) > 1; }
  // The range of a lane within the part of the rank that carries it on host h, if each rank has
  // `part`.
  std::pair<int64_t, int64_t> WithinPart(const Lane& lane, int h, int64_t part) const {
    const auto [first, last] = lane.Of(part * layout_.ranks_on(h));
    const int64_t start = layout_.local_of[lane.ranks[h]] * part;
    return {first - start, last - start};
  }

  template <class Body>
  void Take(const ShmCall& call, Deadline deadline, Body body) {
    Turn turn = {call, deadline, DescribeCall(call), false, false, {}, kPieceBytes};
    links_.ThrowIfBroken(turn.what);
    std::string why;
    try {
      return body(turn);
    } catch (const c10::DistBackendError& e) {
      Break(e.what_without_backtrace());
      throw;
    } catch (const c10::Error& e) {
      if (turn.disagreed) throw;
      why = e.what_without_backtrace();
    } catch (const std::exception& e) {
      why = e.what();
    }
    why = c10::str(turn.what, " on rank ", rank_, ": ", why);
    Break(why);
    C10_THROW_ERROR(DistBackendError, why);
  }

  [[noreturn]] void Disagree(Turn& turn, const std::string& text) {
    turn.disagreed = true;
    TORCH_CHECK(false, text);
  }

  // --- meetings ---

  // The place at which the other ranks of this host find `bytes` from `data`; none if this rank is
  // alone.
  ShmPlace PlaceOf(const char* data, int64_t bytes) const {
    return segment_ == nullptr ? ShmPlace()
                               : memory_.pool->Find(data, static_cast<uint64_t>(bytes));
  }
  bool MustStage(const ShmPlace& placed) const { return segment_ != nullptr && !placed; }

  // Returns when all ranks of the host have begun the step, with the same call.
  void MeetHost(Turn& turn) {
    if (segment_ == nullptr) return;
    segment_->Meet(turn.deadline, turn.what);
    bool same = true;
    for (int i = 0; i < locals_; ++i) same = same && segment_->call(i) == segment_->call(0);
    if (same) return;
    std::vector<ShmCall> calls;
    for (int i = 0; i < locals_; ++i) calls.push_back(segment_->call(i));
    const std::string text = DescribeDisagreement(layout_.hosts[host_], calls);
    MeetHosts(turn, text);
  }

  // Returns when all peers, and so all hosts, are in this call; frame_.data is sent along. Throws,
  // on every rank of every host alike, if the ranks of some host disagree (`failure`) or hosts do.
  void MeetHosts(Turn& turn, const std::string& failure = "") {
    turn.agreed = true;
    frame_.call = turn.call;
    frame_.rank = rank_;
    frame_.failed = failure.empty() ? 0 : 1;
    if (!failure.empty()) {
      std::memset(frame_.data, 0, sizeof(frame_.data));
      std::memcpy(frame_.data, failure.data(), std::min(failure.size(), sizeof(frame_.data) - 1));
    }
    const std::vector<int>& peers = links_.peers();
    std::vector<Message> arrivals;
    for (size_t i = 0; i < peers.size(); ++i) {
      arrivals.push_back(
          links_.Receive(peers[i], kFrameTag, &frames_[i], sizeof(Frame), turn.what));
    }
    for (const int peer : peers) {
      turn.sends.push_back(links_.Send(peer, kFrameTag, &frame_, sizeof(Frame), turn.what));
    }
    for (Message& arrival : arrivals) links_.Wait(arrival, turn.links_deadline(), turn.what);
    WaitForSends(turn);
    if (!failure.empty()) Disagree(turn, failure);
    bool same = true;
    std::vector<int> ranks = {rank_};
    std::vector<ShmCall> calls = {turn.call};
    for (const Frame& frame : frames_) {
      if (frame.failed != 0) {
        Disagree(turn, std::string(frame.data, strnlen(frame.data, sizeof(frame.data))));
      }
      same = same && frame.call == turn.call;
      ranks.push_back(frame.rank);
      calls.push_back(frame.call);
    }
    if (!same) Disagree(turn, DescribeDisagreement(ranks, calls));
  }

  // Begins a chunk: determines where every rank's data are, in the stage or in `placed`.
  void MeetWithData(Turn& turn, const ShmPlace& placed, char* data) {
    const bool staged = MustStage(placed);
    if (segment_ != nullptr) segment_->Begin(turn.call, staged ? stage_place_ : placed);
    MeetHost(turn);
    for (int i = 0; i < locals_; ++i) {
      places_[i] = i == local_ ? (staged ? stage_ : data) : segment_->At(i);
      staged_[i] = i == local_ ? staged : places_[i] == stages_[i];
    }
    if (!turn.agreed) MeetHosts(turn);
  }

  // Ends a chunk: all data that ranks have written for each other are there, and no rank still
  // reads.
  void MeetAgain(Turn& turn) {
    if (segment_ != nullptr) segment_->Meet(turn.deadline, turn.what);
  }

  // --- small data, inside the frames ---

  // Shares `bytes` among all ranks of the host; returns the address of those of each rank.
  std::vector<const char*> ShareAtOnce(Turn& turn, const char* data, int64_t bytes) {
    if (segment_ == nullptr) return {data};
    segment_->Begin(turn.call);
    if (bytes > 0) std::memcpy(segment_->slot(), data, bytes);
    MeetHost(turn);
    std::vector<const char*> slots;
    for (int i = 0; i < locals_; ++i) slots.push_back(segment_->slot(i));
    return slots;
  }

  // Sums the data of all hosts in their frames.
  void SumAtOnce(Turn& turn, const Kind& kind, const char* data, int64_t count) {
    std::vector<ReduceSource> sources;
    for (const char* const from : ShareAtOnce(turn, data, count * kind.width)) {
      sources.push_back({from});
    }
    ReduceSources(kind.dtype, kind.op, sources, {frame_.data}, /*wide_outs=*/true, 0, count);
    MeetHosts(turn);
  }

  void CombineAtOnce(const Kind& kind, int64_t begin, int64_t count, char* out) {
    std::vector<ReduceSource> sources;
    for (const Frame* const frame : frame_of_host_) {
      sources.push_back({frame->data + begin * kind.wide_width, /*wide=*/true});
    }
    ReduceSources(kind.dtype, kind.op, sources, {out}, /*wide_outs=*/false, size(), count);
  }

  void AllGatherAtOnce(Turn& turn, const char* input, const std::vector<char*>& outputs,
                       int64_t bytes) {
    const std::vector<const char*> mine = ShareAtOnce(turn, input, bytes);
    if (bytes > 0) {
      for (int i = 0; i < locals_; ++i) std::memcpy(frame_.data + i * bytes, mine[i], bytes);
    }
    MeetHosts(turn);
    if (bytes == 0) return;
    for (int r = 0; r < size(); ++r) {
      std::memcpy(outputs[r],
                  frame_of_host_[layout_.host_of[r]]->data + layout_.local_of[r] * bytes, bytes);
    }
  }

  void BroadcastAtOnce(Turn& turn, char* data) {
    const int64_t bytes = turn.call.bytes;
    const int root = turn.call.root;
    const std::vector<const char*> mine = ShareAtOnce(turn, data, rank_ == root ? bytes : 0);
    if (layout_.host_of[root] == host_ && bytes > 0) {
      std::memcpy(frame_.data, mine[layout_.local_of[root]], bytes);
    }
    MeetHosts(turn);
    if (rank_ != root && bytes > 0) {
      std::memcpy(data, frame_of_host_[layout_.host_of[root]]->data, bytes);
    }
  }

  // --- sums ---

  std::vector<LaneSums> NewSums() const {
    std::vector<LaneSums> sums;
    for (const int lane : my_lanes_) {
      LaneSums one;
      one.lane = lane;
      one.of = &lanes_[lane];
      one.counts.resize(hosts_);
      one.sources.resize(hosts_);
      one.arrivals.resize(hosts_);
      one.arrived.resize(hosts_);
      sums.push_back(std::move(one));
    }
    return sums;
  }

  // Begins to receive the sums of other hosts for this host's ranges.
  void ExpectSums(Turn& turn, const Kind& kind, std::vector<LaneSums>* sums) {
    int64_t incoming = 0, outgoing = 0;
    for (const LaneSums& lane : *sums) {
      for (int h = 0; h < hosts_; ++h) {
        if (h != host_) outgoing += lane.counts[h];
      }
      incoming += lane.counts[host_] * (hosts_ - 1);
    }
    Grow(&incoming_, incoming * kind.wide_width);
    if (locals_ > 1) Grow(&outgoing_, outgoing * kind.wide_width);
    char* to = incoming_.memory.get();
    for (LaneSums& lane : *sums) {
      const int64_t count = lane.counts[host_];
      for (int h = 0; h < hosts_; ++h) {
        if (h == host_) continue;
        const int64_t width = SendsWide(h) ? kind.wide_width : kind.width;
        lane.arrived[h] = to;
        for (int64_t at = 0; at < count; at += kind.piece()) {
          lane.arrivals[h].push_back(
              links_.Receive(lane.of->ranks[h], SumTag(lane.lane), to + at * width,
                             std::min(kind.piece(), count - at) * width, turn.what));
        }
        to += count * kind.wide_width;
      }
    }
  }

  // Sends this host's sums of the others' ranges, to the next host first.
  void SendSums(Turn& turn, const Kind& kind, const std::vector<LaneSums>& sums) {
    char* to = outgoing_.memory.get();
    bool more = true;
    for (int64_t at = 0; more; at += kind.piece()) {
      more = false;
      for (int distance = 1; distance < hosts_; ++distance) {
        const int h = (host_ + distance) % hosts_;
        for (const LaneSums& lane : sums) {
          const int64_t n = std::min(kind.piece(), lane.counts[h] - at);
          if (n <= 0) continue;
          more = true;
          const char* from = lane.sources[h][0] + at * kind.width;
          int64_t bytes = n * kind.width;
          if (locals_ > 1) {
            SumOfHost(kind, lane, h, at, n, to);
            from = to;
            bytes = n * kind.wide_width;
            to += bytes;
          }
          turn.sends.push_back(
              links_.Send(lane.of->ranks[h], SumTag(lane.lane), from, bytes, turn.what));
        }
      }
    }
  }

  // Sums `n` elements of host h's range over the ranks of this host.
  void SumOfHost(const Kind& kind, const LaneSums& lane, int h, int64_t at, int64_t n, char* out) {
    std::vector<ReduceSource> sources;
    for (const char* const source : lane.sources[h]) sources.push_back({source + at * kind.width});
    ReduceSources(kind.dtype, kind.op, sources, {out}, /*wide_outs=*/true, 0, n);
  }

  // Adds up this host's range as its pieces arrive; calls done(at, n) after each.
  void Combine(Turn& turn, const Kind& kind, LaneSums& lane,
               const std::function<void(int64_t, int64_t)>& done) {
    const int64_t count = lane.counts[host_];
    std::vector<ReduceSource> sources(hosts_);
    std::vector<void*> outs(lane.outs.size());
    Grow(&own_, std::min(kind.piece(), count) * kind.wide_width);
    for (int64_t at = 0; at < count; at += kind.piece()) {
      const int64_t n = std::min(kind.piece(), count - at);
      if (locals_ > 1) SumOfHost(kind, lane, host_, at, n, own_.memory.get());
      for (int h = 0; h < hosts_; ++h) {
        if (h == host_) {
          sources[h] = locals_ > 1 ? ReduceSource{own_.memory.get(), true}
                                   : ReduceSource{lane.sources[host_][0] + at * kind.width, false};
          continue;
        }
        links_.Wait(lane.arrivals[h][at / kind.piece()], turn.links_deadline(), turn.what);
        const int64_t width = SendsWide(h) ? kind.wide_width : kind.width;
        sources[h] = {lane.arrived[h] + at * width, SendsWide(h)};
      }
      for (size_t i = 0; i < outs.size(); ++i) outs[i] = lane.outs[i] + at * kind.width;
      ReduceSources(kind.dtype, kind.op, sources, outs, /*wide_outs=*/false, size(), n);
      done(at, n);
    }
  }

  void AllReduceChunk(Turn& turn, const Kind& kind, int64_t begin, int64_t n) {
    const auto at = [&](int i, int64_t element) {
      return places_[i] + (staged_[i] ? element : begin + element) * kind.width;
    };
    std::vector<LaneSums> sums = NewSums();
    std::vector<Block> blocks;
    for (LaneSums& lane : sums) {
      const auto [first, last] = lane.of->Of(n);
      const auto range = [&, first = first, last = last](int h) {
        const auto [from, to] = ShareOf(last - first, h, hosts_);
        return std::make_pair(first + from, first + to);
      };
      for (int h = 0; h < hosts_; ++h) {
        const auto [from, to] = range(h);
        lane.counts[h] = to - from;
        for (int i = 0; i < locals_; ++i) lane.sources[h].push_back(at(i, from));
      }
      for (int i = 0; i < locals_; ++i) lane.outs.push_back(at(i, range(host_).first));
      for (int step = 1; step < hosts_; ++step) {
        const auto [from, to] = range(Before(step));
        blocks.push_back(
            {lane.lane, at(local_, from), (to - from) * kind.width, step < hosts_ - 1, {}});
      }
    }
    ExpectSums(turn, kind, &sums);
    Expect(turn, &blocks);
    SendSums(turn, kind, sums);
    for (LaneSums& lane : sums) {
      char* const mine = lane.outs[local_];
      Combine(turn, kind, lane, [&](int64_t from, int64_t count) {
        SendPieces(turn, lane.lane, mine + from * kind.width, count * kind.width);
      });
    }
    PassOn(turn, &blocks, [&](const Block& block, int64_t from, int64_t length) {
      const char* const piece = block.data + from;
      for (int i = 0; i < locals_; ++i) {
        if (i != local_) std::memcpy(at(i, 0) + (piece - at(local_, 0)), piece, length);
      }
    });
    WaitForSends(turn);
  }

  // --- the ring of hosts ---

  // Sends a block to the next host, in pieces.
  void SendPieces(Turn& turn, int lane, const char* data, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += turn.piece) {
      turn.sends.push_back(links_.Send(lanes_[lane].ranks[Next()], RingTag(lane), data + at,
                                       std::min(turn.piece, bytes - at), turn.what));
    }
  }

  // Begins to receive blocks from the previous host, those of a lane in the order in which they are
  // sent.
  void Expect(Turn& turn, std::vector<Block>* blocks) {
    for (Block& block : *blocks) {
      for (int64_t at = 0; at < block.bytes; at += turn.piece) {
        block.pieces.push_back(links_.Receive(lanes_[block.lane].ranks[Before(1)],
                                              RingTag(block.lane), block.data + at,
                                              std::min(turn.piece, block.bytes - at), turn.what));
      }
    }
  }

  // Receives the blocks and passes on those that the next host needs; calls came(block, at, bytes)
  // for each piece.
  template <class Came>
  void PassOn(Turn& turn, std::vector<Block>* blocks, Came came) {
    for (Block& block : *blocks) {
      for (size_t i = 0; i < block.pieces.size(); ++i) {
        const int64_t at = static_cast<int64_t>(i) * turn.piece;
        const int64_t bytes = std::min(turn.piece, block.bytes - at);
        links_.Wait(block.pieces[i], turn.links_deadline(), turn.what);
        if (block.forward) SendPieces(turn, block.lane, block.data + at, bytes);
        came(block, at, bytes);
      }
    }
  }

  void GatherChunk(Turn& turn, char* input, const std::vector<char*>& outputs, int64_t begin,
                   int64_t n) {
    char* const stage = stage_ + kChunkBytes;
    std::vector<Block> blocks;
    for (const int lane : my_lanes_) {
      for (int step = 1; step < hosts_; ++step) {
        const int h = Before(step);
        const int r = lanes_[lane].ranks[h];
        const auto [first, last] = WithinPart(lanes_[lane], h, n);
        char* const to = segment_ == nullptr ? outputs[r] + begin : stage + r * n;
        blocks.push_back({lane, to + first, last - first, step < hosts_ - 1, {}});
      }
    }
    Expect(turn, &blocks);
    for (const int lane : my_lanes_) {
      const auto [first, last] = WithinPart(lanes_[lane], host_, n);
      SendPieces(turn, lane, input + begin + first, last - first);
    }
    // While these are on their way, process the data that are here already.
    for (int i = 0; i < locals_; ++i) {
      char* const output = outputs[layout_.hosts[host_][i]];
      if (i == local_) {
        if (output != input) std::memcpy(output + begin, input + begin, n);
      } else {
        std::memcpy(output + begin, places_[i] + (staged_[i] ? 0 : begin), n);
      }
    }
    PassOn(turn, &blocks, [](const Block&, int64_t, int64_t) {});
    WaitForSends(turn);
    if (segment_ == nullptr) return;
    MeetAgain(turn);
    for (const Lane& lane : lanes_) {
      const char* const from = stages_[layout_.local_of[lane.ranks[host_]]] + kChunkBytes;
      for (int h = 0; h < hosts_; ++h) {
        if (h == host_) continue;
        const int r = lane.ranks[h];
        const auto [first, last] = WithinPart(lane, h, n);
        std::memcpy(outputs[r] + begin + first, from + r * n + first, last - first);
      }
    }
  }

  void WaitForSends(Turn& turn) {
    for (Message& message : turn.sends) links_.Wait(message, turn.links_deadline(), turn.what);
    turn.sends.clear();
  }

  // Memory that is kept from call to call, without values.
  struct Scratch {
    std::unique_ptr<char[]> memory;
    int64_t bytes = 0;
  };
  static void Grow(Scratch* scratch, int64_t bytes) {
    if (bytes <= scratch->bytes) return;
    scratch->memory.reset(new char[bytes]);
    scratch->bytes = bytes;
  }

  const HostLayout layout_;
  const std::vector<Lane> lanes_;
  const int rank_;
  const int host_;
  const int hosts_;
  const int local_;   // this rank's place on its host
  const int locals_;  // ranks of this host
  const HostMemory memory_;
  ShmSegment* const segment_;  // null: alone on its host
  const int64_t chunk_bytes_ = MostRanks() > 1 ? kChunkBytes : kLoneChunkBytes;  // on all alike
  HostLinks links_;
  std::vector<int> my_lanes_;

  char* stage_ = nullptr;
  ShmPlace stage_place_;
  // For the ranks of this host: where the data of the current chunk are, whether that is the stage
  // (which has them at its start), and where the stages are.
  std::vector<char*> places_;
  std::vector<char> staged_;
  std::vector<char*> stages_;

  Frame frame_;
  std::vector<Frame> frames_;          // of the peers
  std::vector<Frame*> frame_of_host_;  // one for each host
  Scratch incoming_, outgoing_, own_;
};

}  // namespace

std::unique_ptr<CollectiveEngine> MakeHostsEngine(const HostLayout& layout, int rank,
                                                  c10::intrusive_ptr<c10d::Backend> gloo,
                                                  HostMemory memory,
                                                  CollectiveEngine::Deadline deadline) {
  auto engine = std::make_unique<HostsEngine>(layout, rank, std::move(gloo), std::move(memory));
  engine->OpenStages(deadline);
  return engine;
}

}  // namespace muster
