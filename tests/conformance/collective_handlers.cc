#include <limits>
#include <map>
#include <stdexcept>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "tests/conformance/case_fields.h"
#include "tests/conformance/handlers.h"
#include "tests/conformance/tensor_json.h"
#include "worker/collective/nested_collectives.h"
#include "worker/collective/thread_comm.h"

namespace muster::conformance {
namespace {

using Json = nlohmann::json;

// JSON values stand for the objects of a list.
using List = std::vector<Json>;

List ListFromJson(const Json& value) { return List(value.begin(), value.end()); }
Json ListToJson(const List& list) {
  Json out = Json::array();
  for (const Json& item : list) out.push_back(item);
  return out;
}

at::Tensor IntsFromJson(const Json& value) {
  return TensorFromJson(value, at::kLong, ShapeOfJson(value));
}

template <class T, class ToJson>
Json Split(const Json& in, const T& value, const ToJson& to_json) {
  const int n = RanksOf(in);
  Json per_process = Json::array();
  for (int rank = 0; rank < n; ++rank) {
    per_process.push_back(
        to_json(SplitBetweenProcesses(n, rank, value, in.at("apply_padding").get<bool>())));
  }
  return {{"per_process", per_process}};
}

template <class T, class FromJson, class ToJson>
Json SplitMap(const Json& in, const FromJson& from_json, const ToJson& to_json) {
  std::map<std::string, T> value;
  for (const auto& [key, item] : in.at("value").items()) value.emplace(key, from_json(item));
  return Split(in, value, [&](const std::map<std::string, T>& part) {
    Json out = Json::object();
    for (const auto& [key, item] : part) out[key] = to_json(item);
    return out;
  });
}

Json SplitBetweenProcessesCase(const Json& in) {
  const std::string type = in.at("type");
  if (type == "list" || type == "tuple") return Split(in, ListFromJson(in.at("value")), ListToJson);
  if (type == "tensor") return Split(in, IntsFromJson(in.at("value")), TensorToJson);
  if (type != "dict") throw std::invalid_argument("split_between_processes: unknown type " + type);
  return in.at("element_type") == "tensor" ? SplitMap<at::Tensor>(in, IntsFromJson, TensorToJson)
                                           : SplitMap<List>(in, ListFromJson, ListToJson);
}

Json PadAcrossProcessesCase(const Json& in) {
  const int n = RanksOf(in);
  std::vector<at::Tensor> padded(n);
  RunRanks(n, [&](Comm& comm) {
    const at::Tensor mine =
        TensorFromJson(in.at("values").at(comm.rank()), DtypeFromName(in.at("dtype")),
                       in.at("shapes").at(comm.rank()));
    padded[comm.rank()] =
        PadAcrossProcesses(comm, mine, IntOf(in, "dim", std::numeric_limits<int64_t>::min()),
                           NumberFromJson(in.at("pad_index")), in.at("pad_first").get<bool>());
  });
  Json out = {{"shapes", Json::array()}, {"values", Json::array()}};
  for (const at::Tensor& tensor : padded) {
    out["shapes"].push_back(tensor.sizes().vec());
    out["values"].push_back(TensorToJson(tensor));
  }
  return out;
}

}  // namespace

std::map<std::string, Handler> CollectiveHandlers() {
  return {{"split_between_processes", SplitBetweenProcessesCase},
          {"pad_across_processes", PadAcrossProcessesCase}};
}

}  // namespace muster::conformance
