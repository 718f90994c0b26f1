#ifndef MUSTER_INTERNAL_PLAIN_ROWS_H_
#define MUSTER_INTERNAL_PLAIN_ROWS_H_

#include "worker/checkpoint/state_dict.h"
#include "worker/train/plain_state.h"

namespace muster::internal {

// Puts rows of numbers into the scalars of a file: a row "name" becomes "name.0", "name.1", ...;
// without numbers it is "name.empty" alone.
void PutRows(const PlainState& rows, StateDict* state);
// Returns the rows of a file. Throws c10::Error for a scalar that is no number.
PlainState Rows(const StateDict& file);

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_PLAIN_ROWS_H_
