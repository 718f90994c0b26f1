#ifndef MUSTER_EXAMPLES_LOOPS_RESULT_H_
#define MUSTER_EXAMPLES_LOOPS_RESULT_H_

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "muster/muster.h"

// (collective) Ends each of these programs. Prints "MEASURE VALUE, the same weights on N
// process(es)", after it has compared the weights of all processes, bit for bit. An error: weights
// that differ; a `value` of `limit` or more.
inline absl::Status Report(muster::Accelerator& accelerator, const std::string& measure,
                           double value, double limit, const std::vector<torch::Tensor>& weights) {
  for (size_t i = 0; i < weights.size(); ++i) {
    const torch::Tensor all = accelerator.gather(weights[i].detach().unsqueeze(0));
    if (!all.eq(all[0]).all().item<bool>()) {
      return absl::InternalError(absl::StrCat("weight ", i, " differs between the processes"));
    }
  }
  accelerator.print("%s %.5f, the same weights on %d process(es)\n", measure.c_str(), value,
                    accelerator.num_processes());
  if (value < limit) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(measure, " is ", value, ", not below ", limit));
}

#endif  // MUSTER_EXAMPLES_LOOPS_RESULT_H_
