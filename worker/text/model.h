#ifndef MUSTER_WORKER_TEXT_MODEL_H_
#define MUSTER_WORKER_TEXT_MODEL_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/text/vocabulary.h"

namespace muster::text {

// A piece of a word: bytes [begin, end) of it.
struct Token {
  uint32_t id = 0;
  uint32_t begin = 0;
  uint32_t end = 0;
  bool unknown = false;  // its text is its own, not the vocabulary's
};

// Divides words into tokens of a vocabulary. Immutable, thread-safe.
class Model {
 public:
  // Memory that calls in one thread reuse. Made by the model that uses it.
  class Scratch {
   public:
    virtual ~Scratch() = default;
  };

  virtual ~Model() = default;

  // Appends the tokens of `word`, which is not empty. Errors: FAILED_PRECONDITION if a part of it
  // is not in the vocabulary, which has no unknown token either.
  virtual absl::Status Tokenize(absl::string_view word, Scratch& scratch,
                                std::vector<Token>& tokens) const = 0;

  virtual std::unique_ptr<Scratch> NewScratch() const = 0;
  virtual const Vocabulary& vocabulary() const = 0;

  // Returns the same model for words that are written as bytes, not in the byte-level alphabet:
  // ranges then count those bytes. nullptr: there is none. Exists as long as this one.
  virtual const Model* OfBytes() const { return nullptr; }

 protected:
  Model() = default;
};

// Makes the model that `json` describes, at `path` in its file. Errors: INVALID_ARGUMENT if a field
// is wrong; UNIMPLEMENTED if a type or setting is not supported. All name the field.
absl::StatusOr<std::unique_ptr<Model>> MakeModel(const nlohmann::json& json,
                                                 const std::string& path);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_MODEL_H_
