#ifndef MUSTER_WORKER_COLLECTIVE_COMM_CHECKS_H_
#define MUSTER_WORKER_COLLECTIVE_COMM_CHECKS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "worker/collective/comm.h"

// The argument checks that every Comm makes before it communicates. Each throws c10::Error with one
// line that names the operation, the rank and what is wrong.
namespace muster::comm_checks {

// Returns "sum", "mean", "max" or "min".
const char* OpName(ReduceOp op);

// Returns a text such as "float32[2, 3]"; "undefined" for an undefined tensor.
std::string Describe(const at::Tensor& tensor);
std::string DescribeShape(at::ScalarType dtype, at::IntArrayRef shape);

// Checks that it is defined and dense.
void CheckTensor(const at::Tensor& tensor, const char* operation, int rank);
// As CheckTensor, and checks that the dtype can be reduced: kMean needs floating or complex
// tensors, kMax and kMin no complex ones.
void CheckReduce(const at::Tensor& tensor, ReduceOp op, int rank);
// As CheckTensor, and checks that it is 1-D, contiguous, and of `size` equal parts.
void CheckFlat(const at::Tensor& flat, int size, const char* operation, int rank);
// As CheckFlat, and checks that it is floating, and `op` a sum or a mean.
void CheckReduceScatter(const at::Tensor& flat, ReduceOp op, int size, int rank);
void CheckRoot(int root, int size, const char* operation, int rank);
// For the root of a scatter: checks that there are as many parts as ranks, all defined.
void CheckParts(const std::vector<at::Tensor>& parts, int size, int rank);
// Checks that `part` fits into `out` of rank `rank`.
void CheckPart(const at::Tensor& part, const at::Tensor& out, int rank);

// Describes for a message how ranks differ: "rank 0 has X; ranks 1, 2 have Y", in the order of the
// first rank of each group. `texts`: one for each rank, or for each of `ranks`; `one` and `many`:
// the verb after one rank and after several. Of many ranks or groups only the first are listed.
std::string ByRanks(const std::vector<std::string>& texts, const char* one, const char* many,
                    const std::vector<int>& ranks = {});

// Which tensor of a structure a collective is for, and of how many; one alone is 0 of 1. Ranks
// compare it, because a rank whose structure has fewer tensors would otherwise pair everything that
// it sends afterwards with the wrong tensors of the others.
struct TensorPlace {
  int32_t index = 0;
  int32_t count = 1;
  bool operator==(const TensorPlace&) const = default;
};
// Sets the place for the collectives that this thread calls while it lives.
class PlaceScope {
 public:
  PlaceScope(size_t index, size_t count);
  ~PlaceScope();
  PlaceScope(const PlaceScope&) = delete;
  PlaceScope& operator=(const PlaceScope&) = delete;

 private:
  const TensorPlace before_;
};
TensorPlace CurrentPlace();
// Returns ", tensor 2 of 3"; "" for a single tensor.
std::string Describe(const TensorPlace& place);

}  // namespace muster::comm_checks

#endif  // MUSTER_WORKER_COLLECTIVE_COMM_CHECKS_H_
