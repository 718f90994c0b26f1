#include "tests/conformance/tensor_json.h"

#include <cmath>
#include <limits>
#include <stdexcept>

#include "ATen/Functions.h"

namespace muster::conformance {
namespace {

using Json = nlohmann::json;

void Flatten(const Json& values, std::vector<Json>* flat) {
  if (!values.is_array()) {
    flat->push_back(values);
    return;
  }
  for (const Json& value : values) Flatten(value, flat);
}

}  // namespace

double NumberFromJson(const Json& value) {
  if (value.is_number()) return value.get<double>();
  if (value == "nan") return std::numeric_limits<double>::quiet_NaN();
  if (value == "inf") return std::numeric_limits<double>::infinity();
  if (value == "-inf") return -std::numeric_limits<double>::infinity();
  throw std::invalid_argument("not a number: " + value.dump());
}

Json NumberToJson(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  return value;
}

at::Tensor TensorFromJson(const Json& values, at::ScalarType dtype,
                          const std::vector<int64_t>& shape) {
  std::vector<Json> flat;
  Flatten(values, &flat);
  at::Tensor out;
  if (at::isIntegralType(dtype, /*includeBool=*/true)) {
    std::vector<int64_t> numbers;
    for (const Json& value : flat) {
      numbers.push_back(value.is_boolean() ? value.get<bool>() : value.get<int64_t>());
    }
    out = at::empty({static_cast<int64_t>(numbers.size())}, at::kLong);
    std::copy(numbers.begin(), numbers.end(), out.data_ptr<int64_t>());
  } else {
    out = at::empty({static_cast<int64_t>(flat.size())}, at::kDouble);
    for (size_t i = 0; i < flat.size(); ++i) out.data_ptr<double>()[i] = NumberFromJson(flat[i]);
  }
  return out.to(dtype).reshape(shape);
}

Json TensorToJson(const at::Tensor& tensor) {
  if (tensor.dim() > 0) {
    Json rows = Json::array();
    for (int64_t i = 0; i < tensor.size(0); ++i) rows.push_back(TensorToJson(tensor.select(0, i)));
    return rows;
  }
  if (tensor.scalar_type() == at::kBool) return tensor.item<bool>();
  if (at::isIntegralType(tensor.scalar_type(), /*includeBool=*/false)) {
    return tensor.item<int64_t>();
  }
  return NumberToJson(tensor.item<double>());
}

std::vector<int64_t> ShapeOfJson(const Json& values) {
  std::vector<int64_t> shape;
  for (const Json* v = &values; v->is_array(); v = &v->front()) {
    shape.push_back(static_cast<int64_t>(v->size()));
    if (v->empty()) break;
  }
  return shape;
}

at::ScalarType DtypeFromName(const std::string& name) {
  if (name == "F32") return at::kFloat;
  if (name == "F64") return at::kDouble;
  if (name == "F16") return at::kHalf;
  if (name == "BF16") return at::kBFloat16;
  if (name == "I64") return at::kLong;
  if (name == "I32") return at::kInt;
  if (name == "BOOL") return at::kBool;
  throw std::invalid_argument("unknown dtype " + name);
}

}  // namespace muster::conformance
