#ifndef MUSTER_TESTS_CONFORMANCE_TENSOR_JSON_H_
#define MUSTER_TESTS_CONFORMANCE_TENSOR_JSON_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"

namespace muster::conformance {

// Reads golden numbers: JSON numbers or the texts "nan", "inf", "-inf".
double NumberFromJson(const nlohmann::json& value);
nlohmann::json NumberToJson(double value);

// Reads nested lists (or one flat list) of golden numbers, row by row, as a contiguous CPU tensor
// of `shape`.
at::Tensor TensorFromJson(const nlohmann::json& values, at::ScalarType dtype,
                          const std::vector<int64_t>& shape);
// Returns nested lists of the tensor's shape; a 0-d tensor is a number. Integers stay integers.
nlohmann::json TensorToJson(const at::Tensor& tensor);
// Returns the shape of nested lists; [] for a number.
std::vector<int64_t> ShapeOfJson(const nlohmann::json& values);

// Reads "F32", "F64", "I64", ... (safetensors' names).
at::ScalarType DtypeFromName(const std::string& name);

}  // namespace muster::conformance

#endif  // MUSTER_TESTS_CONFORMANCE_TENSOR_JSON_H_
