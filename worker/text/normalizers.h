#ifndef MUSTER_WORKER_TEXT_NORMALIZERS_H_
#define MUSTER_WORKER_TEXT_NORMALIZERS_H_

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/text/aligned_text.h"

namespace muster::text {

// Changes a text before it is divided into words. Immutable, thread-safe.
class Normalizer {
 public:
  virtual ~Normalizer() = default;

  // `original` is the range that the whole of `text` stands for. Errors: those of Pattern::Find;
  // RESOURCE_EXHAUSTED if the text grows beyond MaxGrownBytes().
  virtual absl::Status Normalize(AlignedText& text, ByteRange original) const = 0;

 protected:
  Normalizer() = default;
};

// Makes the component that `json` describes, at `path` in its file; nullptr for null. Errors:
// INVALID_ARGUMENT if a field is wrong; UNIMPLEMENTED if a type or setting is not supported. All
// name the field.
absl::StatusOr<std::unique_ptr<Normalizer>> MakeNormalizer(const nlohmann::json& json,
                                                           const std::string& path);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_NORMALIZERS_H_
