#ifndef MUSTER_WORKER_TEXT_PRE_TOKENIZERS_H_
#define MUSTER_WORKER_TEXT_PRE_TOKENIZERS_H_

#include <memory>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/text/aligned_text.h"
#include "worker/text/pattern.h"

namespace muster::text {

// Divides a text into the words that the model sees. Immutable, thread-safe.
class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;

  // Divides every span that is not an added token, and may rewrite it. Drops empty spans. Errors:
  // those of Pattern::Find.
  virtual absl::Status Split(SplitText& split) const = 0;

  // For a model that reads bytes: if the last step of this pre-tokenizer writes every byte in the
  // byte-level alphabet, returns one with only the other steps, which is never *this, even if there
  // are none. Otherwise nullptr.
  virtual const PreTokenizer* WithoutByteAlphabet() const { return nullptr; }

 protected:
  PreTokenizer() = default;
};

// Makes the component that `json` describes, at `path` in its file; nullptr for null. Errors:
// INVALID_ARGUMENT if a field is wrong; UNIMPLEMENTED if a type or setting is not supported. All
// name the field.
absl::StatusOr<std::unique_ptr<PreTokenizer>> MakePreTokenizer(const nlohmann::json& json,
                                                               const std::string& path);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_PRE_TOKENIZERS_H_
