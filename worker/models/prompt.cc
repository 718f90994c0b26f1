#include "worker/models/prompt.h"

#include <algorithm>

#include "ATen/TensorOperators.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/tensor.h"

namespace muster::models {
namespace {

// Returns tokens without padding, row by row.
std::vector<Tokens> RowsOf(const at::Tensor& ids, const at::Tensor& mask) {
  const at::Tensor on_cpu = ids.cpu().contiguous();
  const int64_t* const values = on_cpu.const_data_ptr<int64_t>();
  const int64_t length = ids.size(1);
  std::vector<Tokens> rows(ids.size(0));
  const at::Tensor real = mask.defined() ? mask.cpu().contiguous() : at::Tensor();
  for (int64_t row = 0; row < ids.size(0); ++row) {
    for (int64_t i = row * length; i < (row + 1) * length; ++i) {
      if (!real.defined() || real.const_data_ptr<bool>()[i]) rows[row].push_back(values[i]);
    }
  }
  return rows;
}

}  // namespace

PromptReader::PromptReader(CausalLmImpl& model, const at::Tensor& input_ids,
                           const at::Tensor& attention_mask, int64_t room,
                           int64_t prefill_chunk_size, bool run_idle_experts)
    : model_(model),
      room_(room),
      prefill_chunk_size_(prefill_chunk_size),
      run_idle_experts_(run_idle_experts) {
  TORCH_CHECK_VALUE(input_ids.defined() && input_ids.dim() == 2 && input_ids.numel() > 0,
                    "the prompt is empty: it needs at least one token in each row");
  const at::Device device = model.parameters().at(0).device();
  input_ids_ = input_ids.to(device);
  if (attention_mask.defined()) {
    TORCH_CHECK_VALUE(attention_mask.sizes() == input_ids.sizes(), "attention_mask has the shape ",
                      attention_mask.sizes(), ", input_ids ", input_ids.sizes());
    const at::Tensor mask = attention_mask.to(device).to(c10::kBool);
    if (!mask.all().item<bool>()) mask_ = mask;
  }
  prompts_ = RowsOf(input_ids_, mask_);
  const at::Tensor last = mask_.defined() ? mask_.select(1, mask_.size(1) - 1).cpu() : at::Tensor();
  for (size_t row = 0; row < prompts_.size(); ++row) {
    TORCH_CHECK_VALUE(!prompts_[row].empty(), "row ", row, " of the prompt is padding alone");
    TORCH_CHECK_VALUE(!last.defined() || last[static_cast<int64_t>(row)].item<bool>(), "row ", row,
                      " of the prompt is padded on the right: pad on the left, so that "
                      "what is generated follows the prompt");
  }
}

at::Tensor PromptReader::Read(TextBatch batch) {
  return model_.NextLogits(batch, &*cache_, 1, run_idle_experts_).select(1, 0).to(c10::kFloat);
}

at::Tensor PromptReader::ReadPrompt() {
  const int64_t length = input_ids_.size(1);
  cache_.emplace(model_.NewCache(input_ids_.size(0), length + room_));
  at::Tensor positions;
  if (mask_.defined()) {
    const at::Tensor counts = mask_.to(c10::kLong).cumsum(1);
    positions = (counts - 1).clamp_min(0);
    lengths_ = counts.narrow(1, length - 1, 1);
  }
  const int64_t chunk = PrefillChunk(model_.config(), length, prefill_chunk_size_);
  for (int64_t begin = 0;; begin += chunk) {
    const int64_t end = std::min(begin + chunk, length);
    TextBatch batch = {.input_ids = input_ids_.narrow(1, begin, end - begin)};
    if (mask_.defined()) {
      batch.attention_mask = mask_.narrow(1, 0, end);
      batch.position_ids = positions.narrow(1, begin, end - begin);
    }
    if (end == length) return Read(batch);
    model_.NextLogits(batch, &*cache_, /*num_logits=*/0, run_idle_experts_);
  }
}

void PromptReader::Repeat(int64_t times) {
  if (times == 1) return;
  cache_ = cache_->Repeated(times);
  if (!mask_.defined()) return;
  mask_ = mask_.repeat_interleave(times, 0);
  lengths_ = lengths_.repeat_interleave(times, 0);
}

void PromptReader::Reorder(const std::vector<int64_t>& rows) {
  // The beams of one row share its prompt, including padding.
  cache_->Reorder(at::tensor(rows, c10::kLong).to(input_ids_.device()), input_ids_.size(1));
}

at::Tensor PromptReader::ReadNext(const std::vector<int64_t>& tokens) {
  TextBatch batch = {.input_ids =
                         at::tensor(tokens, c10::kLong).unsqueeze(1).to(input_ids_.device())};
  if (mask_.defined()) {
    mask_ = at::cat({mask_, at::ones({mask_.size(0), 1}, mask_.options())}, 1);
    batch.attention_mask = mask_;
    batch.position_ids = lengths_;
    lengths_ = lengths_ + 1;
  }
  return Read(batch);
}

}  // namespace muster::models
