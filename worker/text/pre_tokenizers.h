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

// Cuts a text into the words that the model sees. Immutable, thread-safe.
class PreTokenizer {
 public:
  virtual ~PreTokenizer() = default;

  // Cuts every span that is no added token, and may rewrite it. Spans that are empty vanish.
  // Errors: those of Pattern::Find.
  virtual absl::Status Split(SplitText& split) const = 0;

  // If the last thing that this does is to write every byte in the byte-level alphabet: all but
  // that, for a model that reads bytes. nullptr: it does not; and *this if nothing is left to do is
  // never returned.
  virtual const PreTokenizer* WithoutByteAlphabet() const { return nullptr; }

 protected:
  PreTokenizer() = default;
};

// The component that `json` describes, at `path` in its file; nullptr for null. Errors:
// INVALID_ARGUMENT a field is wrong; UNIMPLEMENTED a type or setting is not supported. All name the
// field.
absl::StatusOr<std::unique_ptr<PreTokenizer>> MakePreTokenizer(const nlohmann::json& json,
                                                               const std::string& path);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_PRE_TOKENIZERS_H_
