#include "worker/train/sync_state.h"

#include <cstring>
#include <utility>
#include <vector>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/empty.h"
#include "c10/util/Exception.h"
#include "worker/parallel/coalesce.h"

namespace muster {
namespace {

// The ranks of one generation run the same binary on machines of the same byte order: numbers are
// sent as they are in memory.
class Writer {
 public:
  void Int(int64_t value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value)); }
  void Double(double value) { bytes_.append(reinterpret_cast<const char*>(&value), sizeof(value)); }
  void Text(const std::string& text) {
    Int(static_cast<int64_t>(text.size()));
    bytes_ += text;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

class Reader {
 public:
  explicit Reader(std::string bytes) : bytes_(std::move(bytes)) {}
  int64_t Int() { return Take<int64_t>(); }
  double Double() { return Take<double>(); }
  std::string Text() {
    const auto size = static_cast<size_t>(Int());
    TORCH_CHECK(size <= bytes_.size() - at_, "a broadcast state is cut off");
    at_ += size;
    return bytes_.substr(at_ - size, size);
  }

 private:
  const std::string bytes_;
  size_t at_ = 0;

  template <typename T>
  T Take() {
    TORCH_CHECK(sizeof(T) <= bytes_.size() - at_, "a broadcast state is cut off");
    T value;
    std::memcpy(&value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }
};

void Write(Writer& writer, const PlainState& state) {
  writer.Int(static_cast<int64_t>(state.size()));
  for (const auto& [name, row] : state) {
    writer.Text(name);
    writer.Int(static_cast<int64_t>(row.size()));
    for (const double value : row) writer.Double(value);
  }
}

PlainState ReadPlain(Reader& reader) {
  PlainState state;
  for (int64_t rows = reader.Int(); rows > 0; --rows) {
    std::vector<double>& row = state[reader.Text()];
    for (int64_t size = reader.Int(); size > 0; --size) row.push_back(reader.Double());
  }
  return state;
}

}  // namespace

PlainState BroadcastPlainState(Comm& comm, const PlainState& state, int root) {
  if (comm.size() == 1) return state;
  Writer writer;
  if (comm.rank() == root) Write(writer, state);
  Reader reader(comm.BroadcastBytes(writer.bytes(), root));
  return ReadPlain(reader);
}

void BroadcastOptimizerState(Comm& comm, OptimizerHandle& optimizer, int root) {
  if (comm.size() == 1) return;
  // It throws on every rank alike, before the others wait for a state that does not come.
  const std::string problem = optimizer.CannotSave();
  TORCH_CHECK(problem.empty(), problem);
  at::NoGradGuard no_grad;
  const bool sender = comm.rank() == root;
  OptimizerState state;
  Writer writer;
  if (sender) {
    state = optimizer.SaveState();
    Write(writer, state.groups);
    writer.Int(static_cast<int64_t>(state.tensors.size()));
    for (const auto& [name, tensor] : state.tensors) {
      writer.Text(name);
      writer.Int(static_cast<int64_t>(tensor.scalar_type()));
      writer.Int(static_cast<int64_t>(tensor.device().type()));
      writer.Int(tensor.dim());
      for (const int64_t size : tensor.sizes()) writer.Int(size);
    }
  }
  Reader reader(comm.BroadcastBytes(writer.bytes(), root));
  if (!sender) {
    state.groups = ReadPlain(reader);
    // Tensors are copied to this rank's own device of the root's kind.
    c10::Device own = optimizer.parameters().at(0).device();
    for (int64_t tensors = reader.Int(); tensors > 0; --tensors) {
      const std::string name = reader.Text();
      const auto type = static_cast<at::ScalarType>(reader.Int());
      const auto device = static_cast<c10::DeviceType>(reader.Int());
      std::vector<int64_t> sizes(static_cast<size_t>(reader.Int()));
      for (int64_t& size : sizes) size = reader.Int();
      state.tensors[name] = at::empty(sizes, at::TensorOptions().dtype(type).device(
                                                 device == own.type() ? own : c10::Device(device)));
    }
  }
  std::vector<at::Tensor> tensors;
  for (const auto& [name, tensor] : state.tensors) tensors.push_back(tensor);
  BroadcastCoalesced(comm, tensors, root);
  if (!sender) optimizer.LoadState(state);
}

}  // namespace muster
