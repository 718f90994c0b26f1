#ifndef MUSTER_WORKER_TEXT_ENCODING_OPS_H_
#define MUSTER_WORKER_TEXT_ENCODING_OPS_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "worker/text/encoding.h"

namespace muster::text {

// Cuts `encoding` to `length` tokens; the rest becomes windows of that length in `overflowing`.
// Errors: INVALID_ARGUMENT if windows that share `stride` tokens would not advance.
absl::Status Truncate(Encoding& encoding, int64_t length, const Truncation& truncation);

// Cuts both so that together they have `length` tokens. `pair` is null if there is no second text.
// Errors: INVALID_ARGUMENT if the strategy needs a second text, or if the text that it names is too
// short to be cut that much; those of the other Truncate.
absl::Status Truncate(Encoding& encoding, Encoding* pair, int64_t length,
                      const Truncation& truncation);

// Appends `other`; combines their windows in all ways.
void Append(Encoding& encoding, const Encoding& other);

// Pads all to one length, including windows; cuts none.
void Pad(std::vector<Encoding>& encodings, const Padding& padding);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_ENCODING_OPS_H_
