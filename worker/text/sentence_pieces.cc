#include "worker/text/sentence_pieces.h"

#include <cstddef>
#include <limits>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/text.h"
#include "worker/text/sentence_piece_model.pb.h"
#include "worker/text/unicode.h"

namespace muster::text {
namespace {

// Trainers make pieces of up to 16 characters, and keep longer ones if configured to.
constexpr size_t kMaxPieceBytes = 1024;
constexpr size_t kMaxMergeBytes = size_t{256} << 20;

}  // namespace

absl::StatusOr<SentencePieces> ReadSentencePieces(absl::string_view bytes) {
  SentencePieceModel model;
  if (bytes.size() > static_cast<size_t>(std::numeric_limits<int>::max()) ||
      !model.ParseFromArray(bytes.data(), static_cast<int>(bytes.size())) ||
      model.pieces_size() == 0) {
    return absl::NotFoundError("tokenizer.model is no model of SentencePiece");
  }
  SentencePieces read = {
      .algorithm = SentencePieceModel::Trainer::Type_Name(model.trainer_spec().model_type())};
  read.pieces.reserve(static_cast<size_t>(model.pieces_size()));
  absl::flat_hash_set<absl::string_view> seen;
  for (const SentencePieceModel::Piece& piece : model.pieces()) {
    const std::string& text = piece.piece();
    const char* const problem = text.empty()                   ? "is empty"
                                : text.size() > kMaxPieceBytes ? "is too long"
                                : !IsValidUtf8(text)           ? "is not UTF-8"
                                : !seen.insert(text).second    ? "is there twice"
                                                               : nullptr;
    if (problem != nullptr) {
      return absl::InvalidArgumentError(
          absl::StrCat("piece ", read.pieces.size(), " (\"", Printable(text, 64), "\") ", problem));
    }
    const bool is_control = piece.type() == SentencePieceModel::Piece::CONTROL;
    read.pieces.push_back(
        {.text = text,
         .is_added = is_control || piece.type() == SentencePieceModel::Piece::USER_DEFINED,
         .is_control = is_control});
  }
  return read;
}

absl::StatusOr<std::vector<std::pair<std::string, std::string>>> MergesOf(
    const std::vector<SentencePiece>& pieces) {
  absl::flat_hash_set<absl::string_view> known;
  for (const SentencePiece& piece : pieces) known.insert(piece.text);
  std::vector<std::pair<std::string, std::string>> merges;
  size_t bytes = 0;
  for (const SentencePiece& piece : pieces) {
    const absl::string_view text = piece.text;
    size_t at = 0;
    NextCharacter(text, at);
    while (at < text.size()) {
      const absl::string_view first = text.substr(0, at), second = text.substr(at);
      NextCharacter(text, at);
      if (!known.contains(first) || !known.contains(second)) continue;
      merges.emplace_back(first, second);
      bytes += sizeof(merges.back()) + text.size();
      if (bytes > kMaxMergeBytes) {
        return absl::InvalidArgumentError("its pieces have more merges than those of any model");
      }
    }
  }
  return merges;
}

}  // namespace muster::text
