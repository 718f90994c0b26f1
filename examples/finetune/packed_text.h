#ifndef MUSTER_EXAMPLES_FINETUNE_PACKED_TEXT_H_
#define MUSTER_EXAMPLES_FINETUNE_PACKED_TEXT_H_

#include <cstdint>
#include <string>

#include "ATen/core/Tensor.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "muster/tokenizer.h"

// Returns the tokens of a text in rows of one length without padding, [rows, row] of int64:
// documents, which blank lines divide, one after the other with `end_token` (if it is not negative)
// between them. Documents are tokenized on all cores. The end that fills no row is left out.
// INVALID_ARGUMENT if no row is full.
absl::StatusOr<at::Tensor> PackText(absl::string_view text, const muster::Tokenizer& tokenizer,
                                    int64_t row, int64_t end_token);

#endif  // MUSTER_EXAMPLES_FINETUNE_PACKED_TEXT_H_
