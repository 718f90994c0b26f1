#include "worker/collective/object_codec.h"

#include "ATen/ops/empty.h"
#include "c10/core/GradMode.h"
#include "worker/collective/plain_tensor.h"

namespace muster::codec_internal {

void PutTensor(const at::Tensor& tensor, std::string* out) {
  PutNumber<uint8_t>(tensor.defined(), out);
  if (!tensor.defined()) return;
  at::NoGradGuard no_grad;
  const at::Tensor cpu = PlainTensor(tensor.detach().cpu());
  PutNumber<int8_t>(static_cast<int8_t>(cpu.scalar_type()), out);
  PutNumber<uint8_t>(static_cast<uint8_t>(cpu.dim()), out);
  for (const int64_t size : cpu.sizes()) PutNumber<int64_t>(size, out);
  out->append(reinterpret_cast<const char*>(cpu.const_data_ptr()), cpu.nbytes());
}

at::Tensor Reader::TakeTensor() {
  if (Number<uint8_t>() == 0) return at::Tensor();
  const auto dtype = static_cast<at::ScalarType>(Number<int8_t>());
  std::vector<int64_t> sizes(Number<uint8_t>());
  for (int64_t& size : sizes) size = Number<int64_t>();
  at::Tensor tensor = at::empty(sizes, dtype);
  const uint64_t n = tensor.nbytes();
  const char* data = Take(n);
  if (n > 0) std::memcpy(tensor.data_ptr(), data, n);
  return tensor;
}

}  // namespace muster::codec_internal
