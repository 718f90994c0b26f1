#include "worker/parallel/same_plan.h"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <tuple>

#include "c10/util/Exception.h"
#include "worker/parallel/packed_numbers.h"

namespace muster {

void CheckSeparateStorage(const std::vector<NamedParameter>& parameters,
                          const std::vector<at::Tensor>& buffers) {
  struct Place {
    const void* storage;
    int64_t begin, end;  // in bytes
    const void* tensor;
    std::string name;
  };
  std::vector<Place> places;
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (tensor.numel() == 0 || tensor.layout() != at::kStrided) return;
    int64_t last = 0;
    for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
    const auto size = static_cast<int64_t>(tensor.element_size());
    const int64_t begin = tensor.storage_offset() * size;
    places.push_back({tensor.storage().unsafeGetStorageImpl(), begin, begin + (last + 1) * size,
                      tensor.unsafeGetTensorImpl(), name});
  };
  for (const NamedParameter& parameter : parameters) add(parameter.name, parameter.tensor);
  for (const at::Tensor& buffer : buffers) add("", buffer);
  std::sort(places.begin(), places.end(), [](const Place& a, const Place& b) {
    return std::tie(a.storage, a.begin) < std::tie(b.storage, b.begin);
  });
  for (size_t i = 1; i < places.size(); ++i) {
    const Place &a = places[i - 1], &b = places[i];
    if (a.storage != b.storage || a.tensor == b.tensor || a.end <= b.begin) continue;
    if (a.name.empty() && b.name.empty()) continue;
    const auto what = [](const Place& place) {
      return place.name.empty() ? std::string("a buffer") : "'" + place.name + "'";
    };
    TORCH_CHECK(false, "parameters ", what(a), " and ", what(b),
                " share memory but are two tensors, which sharding would separate: register one "
                "tensor under both names (register_parameter(name, other->weight))");
  }
}

void VerifySamePlan(Comm& world, const std::vector<PlannedUnit>& plan,
                    const ShardingOptions& options, const Placing& placing) {
  constexpr const char* kNames[] = {"kNone", "kOptimizer", "kGradients", "kFull"};
  std::string mine = c10::str("strategy ", kNames[static_cast<int>(options.strategy)],
                              ", copies of the model that ", placing.ranks, " ranks divide",
                              ", reshard_after_forward ", options.reshard_after_forward,
                              " in groups of ", options.reshard_group_size, "\n");
  // All ranks together reserve room elsewhere.
  mine += c10::str("offload_parameters ", static_cast<int>(options.offload_parameters),
                   placing.stores_parts ? " and the parts of its parameters elsewhere"
                                        : " and the parts of its parameters on their device",
                   "\n");
  mine += c10::str("offload_gradients ", static_cast<int>(options.offload_gradients),
                   placing.stores_gradients ? " and the parts of its gradients elsewhere"
                                            : " and the parts of its gradients beside those",
                   "\n");
  const auto name = [](const std::optional<at::ScalarType>& dtype) {
    return dtype.has_value() ? c10::toString(*dtype) : "none";
  };
  mine += c10::str("parameter_dtype ", name(options.parameter_dtype), ", reduce_dtype ",
                   name(options.reduce_dtype), ", overlap ", options.overlap, "\n");
  for (const PlannedUnit& unit : plan) {
    // A digest of their names, because the text of every rank goes to every rank.
    NumberDigest names;
    for (const NamedParameter& parameter : unit.parameters) {
      for (const char c : parameter.name) names.Add(static_cast<unsigned char>(c));
      names.Add(0);
    }
    mine += c10::str(unit.whole ? "undivided " : "", "unit '", unit.name, "' of ",
                     unit.parameters.size(), " parameters from '", unit.parameters.front().name,
                     "' (names ", names.value(), ")\n");
  }
  const std::vector<std::string> all = world.AllGatherBytes(mine);
  for (size_t rank = 1; rank < all.size(); ++rank) {
    const auto [at, other] =
        std::mismatch(all[0].begin(), all[0].end(), all[rank].begin(), all[rank].end());
    if (at == all[0].end() && other == all[rank].end()) continue;
    const auto line = [](const std::string& text, size_t place) {
      const size_t before = place == 0 ? std::string::npos : text.rfind('\n', place - 1);
      const size_t begin = before == std::string::npos ? 0 : before + 1;
      const std::string found = text.substr(begin, text.find('\n', begin) - begin);
      return found.empty() ? std::string("nothing more") : found;
    };
    const auto place = static_cast<size_t>(at - all[0].begin());
    TORCH_CHECK(false, "the ranks shard the model differently: rank 0 has ", line(all[0], place),
                " where rank ", rank, " has ", line(all[rank], place),
                "; give all ranks the same options.sharding");
  }
}

}  // namespace muster
