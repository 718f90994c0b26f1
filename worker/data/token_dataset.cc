#include "worker/data/token_dataset.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "ATen/ops/empty.h"
#include "absl/cleanup/cleanup.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace muster {

class TokenDataset::Mapping {
 public:
  Mapping(const void* data, size_t size) : data_(data), size_(size) {}
  ~Mapping() { munmap(const_cast<void*>(data_), size_); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  const void* data() const { return data_; }

 private:
  const void* const data_;
  const size_t size_;
};

absl::StatusOr<TokenDataset> TokenDataset::Open(const std::string& path, const Options& options) {
  TokenDataset dataset;
  dataset.options_ = options;
  if (options.stride == 0) dataset.options_.stride = options.context;
  if (options.context < 1 || options.stride < 0) {
    return absl::InvalidArgumentError(absl::StrCat("token data: context is ", options.context,
                                                   " and stride ", options.stride,
                                                   "; they must be at least 1"));
  }
  if (options.bytes_per_token != 1 && options.bytes_per_token != 2 &&
      options.bytes_per_token != 4) {
    return absl::InvalidArgumentError(absl::StrCat(
        "token data: bytes_per_token is ", options.bytes_per_token, "; it must be 1, 2 or 4"));
  }
  // A pipe at this path is refused, not waited for.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) {
    const std::string text = absl::StrCat("token data: cannot open ", path, ": ", strerror(errno));
    return errno == ENOENT ? absl::NotFoundError(text) : absl::FailedPreconditionError(text);
  }
  const auto close_fd = absl::MakeCleanup([fd] { close(fd); });
  struct stat status;
  if (fstat(fd, &status) != 0) {
    return absl::FailedPreconditionError(absl::StrCat("token data: ", path, ": ", strerror(errno)));
  }
  if (!S_ISREG(status.st_mode)) {
    return absl::InvalidArgumentError(absl::StrCat("token data: ", path, " is not a file"));
  }
  const int64_t bytes = status.st_size;
  if (bytes % options.bytes_per_token != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("token data: ", path, " has ", bytes,
                     " bytes, no multiple of bytes_per_token=", options.bytes_per_token));
  }
  dataset.num_tokens_ = bytes / options.bytes_per_token;
  if (dataset.num_tokens_ < options.context + 1) {
    return absl::InvalidArgumentError(absl::StrCat(
        "token data: ", path, " has ", dataset.num_tokens_, " tokens, a sample of context ",
        options.context, " needs ", options.context + 1));
  }
  dataset.num_samples_ = (dataset.num_tokens_ - 1 - options.context) / dataset.options_.stride + 1;
  void* data = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ, MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) {
    return absl::FailedPreconditionError(
        absl::StrCat("token data: cannot map ", path, ": ", strerror(errno)));
  }
  dataset.mapping_ = std::make_shared<Mapping>(data, static_cast<size_t>(bytes));
  return dataset;
}

namespace {

// Copies tokens [begin, context) of a window and the ones after them, as int64.
template <class Token>
void CopyWindow(const Token* __restrict window, int64_t begin, int64_t context,
                int64_t* __restrict inputs, int64_t* __restrict targets) {
  for (int64_t i = begin; i < context; ++i) {
    inputs[i] = window[i];
    targets[i] = window[i + 1];
  }
}

#if defined(__x86_64__)
// A token loader spends its time on widening, and the baseline instruction set has no instruction
// from 16 bits to 64.
__attribute__((target("avx2"))) inline __m256i Widen4(const uint8_t* from) {
  int32_t four;
  std::memcpy(&four, from, sizeof(four));
  return _mm256_cvtepu8_epi64(_mm_cvtsi32_si128(four));
}
__attribute__((target("avx2"))) inline __m256i Widen4(const uint16_t* from) {
  return _mm256_cvtepu16_epi64(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
}
__attribute__((target("avx2"))) inline __m256i Widen4(const uint32_t* from) {
  return _mm256_cvtepu32_epi64(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}

template <class Token>
__attribute__((target("avx2"))) void CopyWindowAvx2(const Token* window, int64_t context,
                                                    int64_t* inputs, int64_t* targets) {
  int64_t i = 0;
  for (; i + 4 <= context; i += 4) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(inputs + i), Widen4(window + i));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(targets + i), Widen4(window + i + 1));
  }
  CopyWindow(window, i, context, inputs, targets);
}
#endif

template <class Token>
void CopyWindows(const Token* tokens, const std::vector<int64_t>& indices, int64_t stride,
                 int64_t context, int64_t* inputs, int64_t* targets) {
#if defined(__x86_64__)
  static const bool kAvx2 = __builtin_cpu_supports("avx2");
#endif
  for (const int64_t index : indices) {
    const Token* const window = tokens + index * stride;
#if defined(__x86_64__)
    if (kAvx2) {
      CopyWindowAvx2(window, context, inputs, targets);
    } else {
      CopyWindow(window, 0, context, inputs, targets);
    }
#else
    CopyWindow(window, 0, context, inputs, targets);
#endif
    inputs += context;
    targets += context;
  }
}

}  // namespace

std::pair<at::Tensor, at::Tensor> TokenDataset::get_batch(
    const std::vector<int64_t>& indices) const {
  for (const int64_t index : indices) {
    TORCH_CHECK(index >= 0 && index < num_samples_, "token data: sample ", index, " of ",
                num_samples_);
  }
  const int64_t rows = static_cast<int64_t>(indices.size());
  at::Tensor inputs = at::empty({rows, options_.context}, at::kLong);
  at::Tensor targets = at::empty({rows, options_.context}, at::kLong);
  const auto copy = [&]<class Token>(const Token* tokens) {
    CopyWindows(tokens, indices, options_.stride, options_.context, inputs.data_ptr<int64_t>(),
                targets.data_ptr<int64_t>());
  };
  switch (options_.bytes_per_token) {
    case 1:
      copy(static_cast<const uint8_t*>(mapping_->data()));
      break;
    case 2:
      copy(static_cast<const uint16_t*>(mapping_->data()));
      break;
    default:
      copy(static_cast<const uint32_t*>(mapping_->data()));
      break;
  }
  return {std::move(inputs), std::move(targets)};
}

}  // namespace muster
