#ifndef MUSTER_WORKER_TEXT_SENTENCE_PIECES_H_
#define MUSTER_WORKER_TEXT_SENTENCE_PIECES_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::text {

// A vocabulary of SentencePiece, as stored in tokenizer.model. Pure.

struct SentencePiece {
  std::string text;
  // Whether it is cut out of a text before the model sees it: true for every piece that the trainer
  // was configured to keep whole.
  bool is_added = false;
  bool is_control = false;  // an added piece that has no text
};

struct SentencePieces {
  std::vector<SentencePiece> pieces = {};  // by id
  std::string algorithm = "";              // "BPE", "UNIGRAM", "WORD" or "CHAR"
};

// Errors: NOT_FOUND if the bytes are not a model of SentencePiece; INVALID_ARGUMENT naming a piece
// that is empty, too long, repeated, or not UTF-8.
absl::StatusOr<SentencePieces> ReadSentencePieces(absl::string_view bytes);

// Returns the merges of BPE, which the file does not hold: every way to make a piece from two
// others, in the order of the result, the shorter first part first. Errors: INVALID_ARGUMENT if
// they take more memory than those of any real model.
absl::StatusOr<std::vector<std::pair<std::string, std::string>>> MergesOf(
    const std::vector<SentencePiece>& pieces);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_SENTENCE_PIECES_H_
