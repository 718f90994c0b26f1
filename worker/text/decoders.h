#ifndef MUSTER_WORKER_TEXT_DECODERS_H_
#define MUSTER_WORKER_TEXT_DECODERS_H_

#include <functional>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::text {

// One step from the texts of tokens to text. Tokens come one after another, each in one or more
// parts that are whole characters, and are passed to the next step as soon as later ones cannot
// change them. For one stream, one thread at a time.
class DecodeStep {
 public:
  virtual ~DecodeStep() = default;

  // `added`: whether the token is an added one, whose text is literal.
  virtual void Begin(bool added) = 0;
  virtual void Text(absl::string_view part) = 0;
  virtual void End() = 0;
  // Notes that no more tokens come.
  virtual void Finish() = 0;

 protected:
  DecodeStep() = default;
};

// The steps of one stream, and the text that they have produced. Not thread-safe.
class DecodeChain {
 public:
  void Push(absl::string_view token, bool added);
  void Finish() { first_->Finish(); }
  // Returns the text that was produced since the last call. Errors: those of Pattern::Find.
  absl::StatusOr<std::string> Take();

 private:
  friend class Decoder;
  std::unique_ptr<absl::Status> status_ = std::make_unique<absl::Status>();
  std::unique_ptr<std::string> out_ = std::make_unique<std::string>();
  std::vector<std::unique_ptr<DecodeStep>> steps_;
  DecodeStep* first_ = nullptr;
};

// Converts the texts of tokens into text. Immutable, thread-safe.
class Decoder {
 public:
  // Makes the step that precedes `next`; an error goes to `status`.
  using StepMaker =
      std::function<std::unique_ptr<DecodeStep>(DecodeStep& next, absl::Status& status)>;

  // Makes the component that `json` describes, at `path` in its file; null joins tokens with blanks
  // between them. Errors: INVALID_ARGUMENT if a field is wrong; UNIMPLEMENTED if a type or setting
  // is not supported. All name the field.
  static absl::StatusOr<Decoder> Make(const nlohmann::json& json, const std::string& path);

  // Makes the steps for one stream. The chain must not outlive this object.
  DecodeChain NewChain() const;

 private:
  std::vector<StepMaker> steps_;
  bool separated_ = false;
};

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_DECODERS_H_
