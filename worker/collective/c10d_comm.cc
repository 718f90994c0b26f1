#include "worker/collective/c10d_comm.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <memory>
#include <sstream>
#include <string>
#include <utility>

#include "ATen/ops/empty.h"
#include "ATen/ops/empty_like.h"
#include "ATen/ops/from_blob.h"
#include "ATen/ops/view_as_real.h"
#include "c10/core/GradMode.h"
#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "worker/collective/comm_checks.h"
#include "worker/collective/peer_watch.h"
#include "worker/collective/plain_tensor.h"
#include "worker/collective/rank_order_reduce.h"

namespace muster {
namespace {

enum class Operation : uint8_t {
  kAllReduce = 1,
  kAllGather,
  kAllGatherParts,
  kReduceScatter,
  kBroadcast,
  kScatter,
  kAllGatherBytes,
  kBroadcastBytes,
  kBarrier,
  kAgree,
};

const char* Name(Operation operation) {
  switch (operation) {
    case Operation::kAllReduce:
      return "AllReduce";
    case Operation::kAllGather:
      return "AllGather";
    case Operation::kAllGatherParts:
      return "AllGatherParts";
    case Operation::kReduceScatter:
      return "ReduceScatter";
    case Operation::kBroadcast:
      return "Broadcast";
    case Operation::kScatter:
      return "Scatter";
    case Operation::kAllGatherBytes:
      return "AllGatherBytes";
    case Operation::kBroadcastBytes:
      return "BroadcastBytes";
    case Operation::kBarrier:
      return "Barrier";
    case Operation::kAgree:
      return "Scatter (check of the parts)";
  }
  return "an unknown operation";
}

// The tag of the PeerWatch, above the tags of messages, each of which has that of its collective.
constexpr int kWatchTag = 1000000;
constexpr int kFrameBytes = 512;
constexpr int kFrameDims = 8;
// The bytes of a rank's input that a reduce-scatter over Gloo has on the way at a time.
constexpr int64_t kExchangedBytes = 16 << 20;

struct FrameHeader {
  uint64_t sequence;
  // Bytes of payload inside the frame; -1: they follow in a collective of their own.
  int64_t inline_bytes;
  int64_t total_bytes;
  int64_t dims[kFrameDims];
  int32_t detail;  // reduction or root
  int16_t ndim;    // -1: no tensor
  int8_t dtype;
  Operation operation;
  comm_checks::TensorPlace place;
};
constexpr int kInlineBytes = kFrameBytes - static_cast<int>(sizeof(FrameHeader));
static_assert(kInlineBytes > 256);

// Describes a rank's call as a comparable text, which is built only if there is something to
// report.
std::string DescribeFrame(const FrameHeader& header, bool with_tensor) {
  std::ostringstream text;
  text << Name(header.operation);
  switch (header.operation) {
    case Operation::kAllReduce:
    case Operation::kReduceScatter:
      text << "(" << comm_checks::OpName(static_cast<ReduceOp>(header.detail)) << ")";
      break;
    case Operation::kBroadcast:
    case Operation::kBroadcastBytes:
    case Operation::kScatter:
      text << "(root " << header.detail << ")";
      break;
    default:
      break;
  }
  text << " #" << header.sequence;
  if (with_tensor && header.ndim >= 0) {
    std::vector<int64_t> dims(header.dims, header.dims + std::min<int>(header.ndim, kFrameDims));
    text << " " << comm_checks::DescribeShape(static_cast<at::ScalarType>(header.dtype), dims);
  }
  text << comm_checks::Describe(header.place);
  return text.str();
}

bool SameCall(const FrameHeader& a, const FrameHeader& b, bool with_tensor) {
  if (a.operation != b.operation || a.sequence != b.sequence || a.detail != b.detail ||
      a.place != b.place) {
    return false;
  }
  return !with_tensor || (a.ndim == b.ndim && a.dtype == b.dtype &&
                          std::equal(a.dims, a.dims + kFrameDims, b.dims));
}

// Returns the bytes of a plain tensor as a flat tensor that shares its storage.
at::Tensor Bytes(const at::Tensor& plain) { return plain.reshape({-1}).view(at::kByte); }

// Whether a sum must be divided before it is rounded: the sum of two values may be too large for
// fp16 although their mean is not. Means of other types have the bits of a sum that is divided.
bool IsNarrow(const at::Tensor& tensor) {
  return tensor.scalar_type() == at::kHalf || tensor.scalar_type() == at::kBFloat16;
}

class C10dComm : public Comm {
 public:
  C10dComm(c10::intrusive_ptr<c10d::ProcessGroup> group, const C10dCommOptions& options)
      : group_(std::move(group)),
        options_(options),
        rank_(group_->getRank()),
        size_(group_->getSize()),
        frame_(at::empty({kFrameBytes}, at::kByte)),
        frames_(at::empty({static_cast<int64_t>(kFrameBytes) * size_}, at::kByte)) {}

  int rank() const override { return rank_; }
  int size() const override { return size_; }
  c10d::ProcessGroup* process_group() override { return group_.get(); }

  void AllReduce(at::Tensor& tensor, ReduceOp op) override {
    comm_checks::CheckReduce(tensor, op, rank_);
    at::NoGradGuard no_grad;
    Begin(Operation::kAllReduce, static_cast<int>(op), &tensor);
    if (options_.check) {
      if (Exchange(/*same_tensors=*/true)) {
        std::vector<at::Tensor> inputs;
        for (int r = 0; r < size_; ++r) inputs.push_back(InlineTensor(r, tensor));
        tensor.copy_(ReduceInRankOrder(inputs, op));
        return;
      }
    }
    if (tensor.numel() == 0) return;
    // Gloo supports neither bool nor 16-bit integers.
    const at::ScalarType dtype = tensor.scalar_type();
    const bool is_bool = dtype == at::kBool;
    at::Tensor work = tensor.detach();
    if (is_bool) {
      work = work.to(at::kByte);
    } else if (dtype == at::kShort) {
      work = work.to(at::kInt);
    }
    work = PlainTensor(work);
    // Neither Gloo nor NCCL supports complex numbers; their sums and means are those of the parts.
    at::Tensor sent = work.is_complex() ? at::view_as_real(work) : work;
    const bool narrow_mean = op == ReduceOp::kMean && IsNarrow(sent);
    // Gloo has no average and adds in the type of its input.
    const bool in_float = narrow_mean && BackendOf(work)->getBackendName() == "gloo";
    const bool averages = narrow_mean && !in_float;
    const at::Tensor reduced = in_float ? sent.to(at::kFloat) : sent;
    auto opts = WaitedFor<c10d::AllreduceOptions>(work);
    switch (op) {
      case ReduceOp::kSum:
        // The sum of bools is "any", and 256 of them must not become 0.
        opts.reduceOp = is_bool ? c10d::ReduceOp::MAX : c10d::ReduceOp::SUM;
        break;
      case ReduceOp::kMean:
        opts.reduceOp = averages ? c10d::ReduceOp::AVG : c10d::ReduceOp::SUM;
        break;
      case ReduceOp::kMax:
        opts.reduceOp = c10d::ReduceOp::MAX;
        break;
      case ReduceOp::kMin:
        opts.reduceOp = c10d::ReduceOp::MIN;
        break;
    }
    std::vector<at::Tensor> tensors = {reduced};
    Run([&] { return BackendOf(work)->allreduce(tensors, opts); });
    if (op == ReduceOp::kMean && !averages) reduced.div_(size_);
    if (in_float) sent.copy_(reduced);
    if (!work.is_same(tensor) && work.data_ptr() != tensor.data_ptr()) tensor.copy_(work);
  }

  std::vector<at::Tensor> AllGather(const at::Tensor& tensor) override {
    comm_checks::CheckTensor(tensor, "AllGather", rank_);
    at::NoGradGuard no_grad;
    Begin(Operation::kAllGather, 0, &tensor);
    std::vector<at::Tensor> all;
    if (options_.check && Exchange(/*same_tensors=*/true)) {
      for (int r = 0; r < size_; ++r) all.push_back(InlineTensor(r, tensor));
      return all;
    }
    at::Tensor input = PlainTensor(tensor);
    const int64_t bytes = static_cast<int64_t>(input.nbytes());
    at::Tensor flat_in = Bytes(input);
    at::Tensor flat_out = at::empty({bytes * size_}, flat_in.options());
    if (bytes > 0) {
      auto opts = WaitedFor<c10d::AllgatherOptions>(input);
      Run([&] { return BackendOf(input)->_allgather_base(flat_out, flat_in, opts); });
    }
    for (int r = 0; r < size_; ++r) {
      all.push_back(
          flat_out.narrow(0, r * bytes, bytes).view(input.scalar_type()).view(input.sizes()));
    }
    return all;
  }

  void AllGatherParts(at::Tensor& flat) override {
    comm_checks::CheckFlat(flat, size_, "AllGatherParts", rank_);
    at::NoGradGuard no_grad;
    Begin(Operation::kAllGatherParts, 0, &flat, /*allow_inline=*/false);
    if (options_.check) Exchange(/*same_tensors=*/true);
    if (flat.numel() == 0) return;
    const at::Tensor work = PlainTensor(flat);
    at::Tensor all = Bytes(work);
    const int64_t part = all.numel() / size_;
    at::Tensor mine = all.narrow(0, rank_ * part, part);
    auto opts = WaitedFor<c10d::AllgatherOptions>(flat);
    Run([&] { return BackendOf(flat)->_allgather_base(all, mine, opts); });
    if (work.data_ptr() != flat.data_ptr()) flat.copy_(work);
  }

  at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp op) override {
    comm_checks::CheckReduceScatter(flat, op, size_, rank_);
    at::NoGradGuard no_grad;
    Begin(Operation::kReduceScatter, static_cast<int>(op), &flat, /*allow_inline=*/false);
    if (options_.check) Exchange(/*same_tensors=*/true);
    at::Tensor input = PlainTensor(flat);
    const int64_t part = input.numel() / size_;
    if (part == 0) return at::empty({0}, input.options());
    if (BackendOf(input)->getBackendName() != "gloo") {
      at::Tensor output = at::empty({part}, input.options());
      auto opts = WaitedFor<c10d::ReduceScatterOptions>(input);
      const bool narrow_mean = op == ReduceOp::kMean && IsNarrow(input);
      if (narrow_mean) opts.reduceOp = c10d::ReduceOp::AVG;
      Run([&] { return BackendOf(input)->_reduce_scatter_base(output, input, opts); });
      return op == ReduceOp::kMean && !narrow_mean ? output.div_(size_) : output;
    }
    // Gloo's own reduce-scatter is made of all-reduces and sends twice as much. Here, every rank
    // sends each other one its part and adds up what it receives.
    std::vector<int64_t> equal;  // empty: all parts have the same size
    auto opts = WaitedFor<c10d::AllToAllOptions>(input);
    const auto exchange = [&](at::Tensor from, at::Tensor to) {
      Run([&] { return BackendOf(input)->alltoall_base(to, from, equal, equal, opts); });
      return ReduceInRankOrder(to.chunk(size_), op);
    };
    const int64_t piece = std::max<int64_t>(
        1, kExchangedBytes / (size_ * static_cast<int64_t>(input.element_size())));
    if (part <= piece) return exchange(input, at::empty_like(input));
    // Exchange in pieces through the same memory: new memory for as much as the input in each call
    // takes longer than the exchange.
    const at::Tensor from = at::empty({size_ * piece}, input.options()), to = at::empty_like(from);
    const at::Tensor parts = input.view({size_, part});
    at::Tensor output = at::empty({part}, input.options());
    for (int64_t first = 0; first < part; first += piece) {
      const int64_t count = std::min(piece, part - first);
      const at::Tensor sent = from.narrow(0, 0, size_ * count);
      sent.view({size_, count}).copy_(parts.narrow(1, first, count));
      output.narrow(0, first, count).copy_(exchange(sent, to.narrow(0, 0, size_ * count)));
    }
    return output;
  }

  void Broadcast(at::Tensor& tensor, int root) override {
    comm_checks::CheckTensor(tensor, "Broadcast", rank_);
    comm_checks::CheckRoot(root, size_, "Broadcast", rank_);
    at::NoGradGuard no_grad;
    Begin(Operation::kBroadcast, root, &tensor);
    if (options_.check && Exchange(/*same_tensors=*/true)) {
      if (rank_ != root) tensor.copy_(InlineTensor(root, tensor));
      return;
    }
    if (tensor.numel() == 0) return;
    at::Tensor work = PlainTensor(tensor);
    BroadcastFlat(Bytes(work), root);
    if (rank_ != root && work.data_ptr() != tensor.data_ptr()) tensor.copy_(work);
  }

  void Scatter(const std::vector<at::Tensor>& parts, at::Tensor& out, int root) override {
    comm_checks::CheckRoot(root, size_, "Scatter", rank_);
    comm_checks::CheckTensor(out, "Scatter", rank_);
    at::NoGradGuard no_grad;
    Begin(Operation::kScatter, root, &out, /*allow_inline=*/false);
    if (options_.check) {
      Exchange(/*same_tensors=*/false);
      // Only the root can compare its parts with the outputs it has just received, and all ranks
      // need the result.
      Agree(rank_ == root ? PartsError(parts) : "");
      operation_ = Operation::kScatter;
      what_ = comm_checks::Describe(out);
    } else if (rank_ == root) {
      comm_checks::CheckParts(parts, size_, rank_);
    }
    if (rank_ != root) {
      if (out.numel() == 0) return;
      at::Tensor work = PlainTensor(out);
      std::vector<at::Tensor> tensors = {Bytes(work)};
      Guard([&] {
        c10::intrusive_ptr<c10d::Work> received = BackendOf(work)->recv(tensors, root, Tag());
        Message message = MessageOf(work, root, std::move(received));
        Wait(message);
      });
      if (work.data_ptr() != out.data_ptr()) out.copy_(work);
      return;
    }
    std::vector<std::vector<at::Tensor>> sent;
    std::vector<Message> messages;
    for (int r = 0; r < size_; ++r) {
      if (r == rank_ || parts[r].numel() == 0) continue;
      sent.push_back({Bytes(PlainTensor(parts[r]))});
      Guard([&] {
        c10::intrusive_ptr<c10d::Work> work = BackendOf(parts[r])->send(sent.back(), r, Tag());
        messages.push_back(MessageOf(parts[r], r, std::move(work)));
      });
    }
    out.copy_(parts[rank_]);
    for (Message& message : messages) Guard([&] { Wait(message); });
  }

  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    Begin(Operation::kAllGatherBytes, 0, nullptr);
    PutBytes(bytes);
    const bool all_inline = Exchange(/*same_tensors=*/false);
    std::vector<std::string> all;
    int64_t longest = 0;
    int64_t sum = 0;
    for (int r = 0; r < size_; ++r) {
      if (all_inline) all.push_back(InlineBytes(r));
      longest = std::max(longest, Header(r).total_bytes);
      sum += Header(r).total_bytes;
    }
    if (all_inline) return all;
    all.resize(size_);
    if (longest * size_ <= 4 * sum) {
      at::Tensor mine = at::empty({longest}, at::kByte);
      std::memcpy(mine.data_ptr(), bytes.data(), bytes.size());
      std::memset(mine.data_ptr<uint8_t>() + bytes.size(), 0, longest - bytes.size());
      at::Tensor out = at::empty({longest * size_}, at::kByte);
      auto opts = WaitedFor<c10d::AllgatherOptions>(out);
      Run([&] { return BackendOf(out)->_allgather_base(out, mine, opts); });
      for (int r = 0; r < size_; ++r) {
        all[r].assign(reinterpret_cast<const char*>(out.data_ptr<uint8_t>()) + r * longest,
                      Header(r).total_bytes);
      }
      return all;
    }
    // A few ranks hold nearly everything: padding the others to their length would cost more than
    // taking turns. Short strings have arrived in the frames already.
    for (int r = 0; r < size_; ++r) {
      if (Header(r).inline_bytes >= 0) {
        all[r] = InlineBytes(r);
        continue;
      }
      all[r] = r == rank_ ? bytes : std::string(Header(r).total_bytes, '\0');
      BroadcastString(&all[r], r);
    }
    return all;
  }

  std::string BroadcastBytes(const std::string& bytes, int root) override {
    comm_checks::CheckRoot(root, size_, "BroadcastBytes", rank_);
    Begin(Operation::kBroadcastBytes, root, nullptr);
    PutBytes(rank_ == root ? bytes : std::string());
    Exchange(/*same_tensors=*/false);
    if (Header(root).inline_bytes >= 0) return InlineBytes(root);
    std::string result = rank_ == root ? bytes : std::string(Header(root).total_bytes, '\0');
    BroadcastString(&result, root);
    return result;
  }

  void Barrier() override {
    Begin(Operation::kBarrier, 0, nullptr);
    Exchange(/*same_tensors=*/false);
  }

 private:
  // Starts collective sequence_ and writes this rank's frame.
  void Begin(Operation operation, int detail, const at::Tensor* tensor, bool allow_inline = true) {
    if (operation != Operation::kAgree) ++sequence_;
    operation_ = operation;
    what_ = tensor == nullptr ? "" : comm_checks::Describe(*tensor);
    if (!broken_.empty()) {
      C10_THROW_ERROR(DistBackendError,
                      c10::str(Where(), ": the group is unusable since ", broken_));
    }
    FrameHeader header = {};
    header.sequence = sequence_;
    header.operation = operation;
    header.detail = detail;
    header.place = comm_checks::CurrentPlace();
    header.ndim = -1;
    if (tensor != nullptr) {
      header.ndim = static_cast<int16_t>(tensor->dim());
      header.dtype = static_cast<int8_t>(tensor->scalar_type());
      for (int64_t d = 0; d < tensor->dim(); ++d) {
        if (d < kFrameDims) {
          header.dims[d] = tensor->size(d);
        } else {
          // More dimensions are rare; they are compared, though not shown.
          header.dims[kFrameDims - 1] = header.dims[kFrameDims - 1] * 1000003 + tensor->size(d);
        }
      }
      header.total_bytes = static_cast<int64_t>(tensor->numel() * tensor->element_size());
      header.inline_bytes = -1;
      if (allow_inline && options_.check && tensor->is_cpu() &&
          header.total_bytes <= kInlineBytes) {
        header.inline_bytes = header.total_bytes;
        const at::Tensor plain = PlainTensor(*tensor);
        if (header.total_bytes > 0) {
          std::memcpy(FrameData() + sizeof(FrameHeader), plain.const_data_ptr(),
                      header.total_bytes);
        }
      }
    }
    std::memcpy(FrameData(), &header, sizeof(header));
  }

  void PutBytes(const std::string& bytes) {
    FrameHeader header;
    std::memcpy(&header, FrameData(), sizeof(header));
    header.total_bytes = static_cast<int64_t>(bytes.size());
    header.inline_bytes = -1;
    if (header.total_bytes <= kInlineBytes) {
      header.inline_bytes = header.total_bytes;
      std::memcpy(FrameData() + sizeof(header), bytes.data(), bytes.size());
    }
    std::memcpy(FrameData(), &header, sizeof(header));
  }

  // Gathers the frames and compares them. Returns whether every rank's data came inside its frame.
  // Throws the same error on every rank if ranks disagree.
  bool Exchange(bool same_tensors) {
    if (size_ == 1) {
      std::memcpy(frames_.data_ptr(), frame_.const_data_ptr(), kFrameBytes);
    } else {
      auto opts = WaitedFor<c10d::AllgatherOptions>(frames_);
      Run([&] { return BackendOf(frames_)->_allgather_base(frames_, frame_, opts); });
    }
    bool all_inline = true;
    bool same = true;
    for (int r = 0; r < size_; ++r) {
      all_inline = all_inline && Header(r).inline_bytes >= 0;
      same = same && SameCall(Header(r), Header(0), same_tensors);
    }
    if (same) return all_inline;
    std::vector<std::string> calls;
    for (int r = 0; r < size_; ++r) calls.push_back(DescribeFrame(Header(r), same_tensors));
    // Ranks may have different sequence numbers; make them equal again.
    for (int r = 0; r < size_; ++r) sequence_ = std::max(sequence_, Header(r).sequence);
    TORCH_CHECK(false, "ranks disagree about a collective: ",
                comm_checks::ByRanks(calls, "called", "called"));
  }

  // Throws the complaint on every rank if one of them has any.
  void Agree(const std::string& complaint) {
    Begin(Operation::kAgree, 0, nullptr);
    PutBytes(complaint.substr(0, kInlineBytes));
    Exchange(/*same_tensors=*/false);
    for (int r = 0; r < size_; ++r) TORCH_CHECK(Header(r).total_bytes == 0, InlineBytes(r));
  }

  std::string PartsError(const std::vector<at::Tensor>& parts) {
    try {
      comm_checks::CheckParts(parts, size_, rank_);
    } catch (const c10::Error& e) {
      return e.what_without_backtrace();
    }
    for (int r = 0; r < size_; ++r) {
      const FrameHeader header = Header(r);
      const std::vector<int64_t> dims(header.dims,
                                      header.dims + std::min<int>(header.ndim, kFrameDims));
      if (parts[r].scalar_type() == static_cast<at::ScalarType>(header.dtype) &&
          parts[r].dim() == header.ndim &&
          (header.ndim > kFrameDims || parts[r].sizes() == at::IntArrayRef(dims))) {
        continue;
      }
      return c10::str("Scatter on rank ", r, ": the part for this rank is ",
                      comm_checks::Describe(parts[r]), " but its output is ",
                      comm_checks::DescribeShape(static_cast<at::ScalarType>(header.dtype), dims));
    }
    return "";
  }

  FrameHeader Header(int r) const {
    FrameHeader header;
    std::memcpy(&header, frames_.const_data_ptr<uint8_t>() + static_cast<size_t>(r) * kFrameBytes,
                sizeof(header));
    return header;
  }
  std::string InlineBytes(int r) const {
    return std::string(reinterpret_cast<const char*>(frames_.const_data_ptr<uint8_t>()) +
                           static_cast<size_t>(r) * kFrameBytes + sizeof(FrameHeader),
                       Header(r).total_bytes);
  }
  // Returns a copy of what rank `r` sent inside its frame, shaped as `like`.
  at::Tensor InlineTensor(int r, const at::Tensor& like) const {
    at::Tensor result = at::empty(like.sizes(), like.options().requires_grad(false));
    if (result.numel() > 0) {
      std::memcpy(result.data_ptr(),
                  frames_.const_data_ptr<uint8_t>() + static_cast<size_t>(r) * kFrameBytes +
                      sizeof(FrameHeader),
                  result.nbytes());
    }
    return result;
  }
  uint8_t* FrameData() { return frame_.data_ptr<uint8_t>(); }

  // A send or receive under way.
  struct Message {
    PeerWatch::Message watched;                // on the CPU
    c10::intrusive_ptr<c10d::Work> unwatched;  // on a device, whose backend notices a lost peer
  };

  Message MessageOf(const at::Tensor& tensor, int peer, c10::intrusive_ptr<c10d::Work> work) {
    Message message;
    if (!tensor.is_cpu()) {
      message.unwatched = std::move(work);
      return message;
    }
    if (watch_ == nullptr) {
      std::vector<int> others;
      for (int r = 0; r < size_; ++r) {
        if (r != rank_) others.push_back(r);
      }
      watch_ = std::make_unique<PeerWatch>(BackendOf(tensor), others, kWatchTag);
    }
    message.watched = watch_->Add(peer, std::move(work));
    return message;
  }

  void Wait(Message& message) {
    if (message.watched) {
      watch_->Wait(&message.watched, options_.timeout);
    } else {
      TORCH_CHECK(message.unwatched->wait(), "the operation was aborted");
    }
  }

  void BroadcastFlat(const at::Tensor& flat, int root) {
    std::vector<at::Tensor> tensors = {flat};
    auto opts = WaitedFor<c10d::BroadcastOptions>(flat);
    opts.rootRank = root;
    Run([&] { return BackendOf(flat)->broadcast(tensors, opts); });
  }

  void BroadcastString(std::string* text, int root) {
    BroadcastFlat(at::from_blob(text->data(), {static_cast<int64_t>(text->size())}, at::kByte),
                  root);
  }

  c10::intrusive_ptr<c10d::Backend> BackendOf(const at::Tensor& tensor) {
    return group_->getBackend(tensor.device().type());
  }

  // Returns the options of a call that is waited for at once: on the CPU it may run in this thread.
  template <class Options>
  Options WaitedFor(const at::Tensor& tensor) const {
    Options opts;
    opts.timeout = options_.timeout;
    opts.asyncOp = !tensor.is_cpu();
    return opts;
  }

  int Tag() const { return static_cast<int>(sequence_ % kWatchTag); }

  std::string Where() const {
    return c10::str(Name(operation_), " #", sequence_, " on rank ", rank_, " of ", size_,
                    what_.empty() ? "" : " (" + what_ + ")");
  }

  void Run(const std::function<c10::intrusive_ptr<c10d::Work>()>& start) {
    Guard([&] { TORCH_CHECK(start()->wait(), "the operation was aborted"); });
  }

  void Guard(const std::function<void()>& body) {
    std::string why;
    try {
      body();
      return;
    } catch (const c10::Error& e) {
      why = e.what_without_backtrace();
    } catch (const std::exception& e) {
      why = e.what();
    }
    broken_ = c10::str(Where(), ": ", why);
    C10_THROW_ERROR(DistBackendError,
                    c10::str(broken_, " (timeout ", options_.timeout.count(), " ms)"));
  }

  const c10::intrusive_ptr<c10d::ProcessGroup> group_;
  const C10dCommOptions options_;
  const int rank_;
  const int size_;
  at::Tensor frame_;
  at::Tensor frames_;
  uint64_t sequence_ = 0;
  // The collective under way, for error messages.
  Operation operation_ = Operation::kBarrier;
  std::string what_;
  // What broke the transport; empty while it works.
  std::string broken_;
  std::unique_ptr<PeerWatch> watch_;  // from the first message on the CPU on
};

}  // namespace

std::unique_ptr<Comm> MakeC10dComm(c10::intrusive_ptr<c10d::ProcessGroup> group,
                                   const C10dCommOptions& options) {
  TORCH_CHECK(group, "MakeC10dComm: no process group");
  return std::make_unique<C10dComm>(std::move(group), options);
}

}  // namespace muster
