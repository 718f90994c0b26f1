#ifndef MUSTER_WORKER_TRAIN_CLIP_H_
#define MUSTER_WORKER_TRAIN_CLIP_H_

#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/collective/comm.h"

namespace muster {

// Clipping of gradients, with torch's results. `parameters` without a gradient are left out, as are
// empty gradients. Nothing here waits for a device, except with error_if_nonfinite.
// Thread-compatible. Under accumulation, call these only when gradients are synchronised; under a
// gradient scaler, after unscaling.

// Returns the gradients of `parameters` that exist and are not empty, each once: LibTorch's
// parameters() lists a tied weight for each module that has it. For a sparse gradient (COO, as for
// an embedding with sparse(true)) returns its values, after it was coalesced in place: rows that
// occur several times are added up, so norms and limits mean what they mean for a dense gradient.
// Throws for other layouts, naming the parameter by its number.
std::vector<at::Tensor> Gradients(const std::vector<at::Tensor>& parameters);
// The same for one defined gradient of any size. `what` names its parameter in the error.
at::Tensor GradientValues(const at::Tensor& parameter, const std::string& what);

// Returns the p-norm of all elements of `tensors` together, computed like torch's: the norm of the
// tensors' own norms. p is any number, inf (the largest absolute value) or -inf (the smallest). A
// 0-d tensor on the device of the first one; 0 if there are none.
at::Tensor TotalNorm(const std::vector<at::Tensor>& tensors, double norm_type = 2);

// Multiplies `tensors` in place by max_norm / (total_norm + 1e-6), at most 1. Always multiplies,
// even by the factor of a NaN or infinite norm, except if max_norm is infinite, which only
// measures.
void ScaleToNorm(const std::vector<at::Tensor>& tensors, double max_norm,
                 const at::Tensor& total_norm);

// Both of the above on the gradients of `parameters`: returns the norm before clipping.
// Throws c10::Error for a negative max_norm, a NaN norm_type, a norm_type of 0 or less with a
// sparse gradient (whose zeros would count), or, with `error_if_nonfinite`, for a NaN or infinite
// norm.
at::Tensor ClipGradNorm(const std::vector<at::Tensor>& parameters, double max_norm,
                        double norm_type = 2, bool error_if_nonfinite = false);

// The same if the ranks of `comm` divide some parameters among them: `shards` are this rank's parts
// of those, `parameters` the others, which all ranks have. A collective; every rank returns the
// norm of the whole. `norm_type` must be above 0.
at::Tensor ClipGradNorm(const std::vector<at::Tensor>& parameters,
                        const std::vector<at::Tensor>& shards, Comm& comm, double max_norm,
                        double norm_type = 2);

// Clamps every element of the gradients to [-clip_value, clip_value].
void ClipGradValue(const std::vector<at::Tensor>& parameters, double clip_value);

// Multiplies the gradients in place (MicroStep::gradient_factor); does nothing for 1.
void ScaleGradients(const std::vector<at::Tensor>& parameters, double factor);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_CLIP_H_
