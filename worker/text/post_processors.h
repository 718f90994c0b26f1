#ifndef MUSTER_WORKER_TEXT_POST_PROCESSORS_H_
#define MUSTER_WORKER_TEXT_POST_PROCESSORS_H_

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/text/encoding.h"

namespace muster::text {

// Adds special tokens around the tokens of one or two texts. Immutable, thread-safe.
class PostProcessor {
 public:
  virtual ~PostProcessor() = default;

  // Returns how many tokens Process adds.
  virtual int64_t AddedTokens(bool pair) const = 0;

  // `parts` are the parts of the result, in order: at first one for each text, later also special
  // tokens. Windows of parts are treated like the parts.
  virtual void Process(std::vector<Encoding>& parts, bool add_special_tokens) const = 0;

 protected:
  PostProcessor() = default;
};

// Makes the component that `json` describes, at `path` in its file; nullptr for null. Errors:
// INVALID_ARGUMENT if a field is wrong; UNIMPLEMENTED if a type or setting is not supported. All
// name the field.
absl::StatusOr<std::unique_ptr<PostProcessor>> MakePostProcessor(const nlohmann::json& json,
                                                                 const std::string& path);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_POST_PROCESSORS_H_
