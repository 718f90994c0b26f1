#include "worker/bigmodel/device_map.h"

#include <algorithm>
#include <cmath>
#include <deque>
#include <limits>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"

namespace muster {
namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 53;

struct ElementType {
  int64_t bits;
  bool is_float;
};

absl::StatusOr<ElementType> FindType(const std::string& dtype) {
  // A boolean counts as one byte, which it takes; Accelerate counts an eighth.
  static const auto* const types = new std::map<std::string, ElementType>{
      {"F64", {64, true}},    {"F32", {32, true}},    {"F16", {16, true}},    {"BF16", {16, true}},
      {"F8_E4M3", {8, true}}, {"F8_E5M2", {8, true}}, {"F8_E8M0", {8, true}}, {"F4", {4, true}},
      {"C64", {64, true}},    {"C128", {128, true}},  {"I64", {64, false}},   {"U64", {64, false}},
      {"I32", {32, false}},   {"U32", {32, false}},   {"I16", {16, false}},   {"U16", {16, false}},
      {"I8", {8, false}},     {"U8", {8, false}},     {"I4", {4, false}},     {"I2", {2, false}},
      {"BOOL", {8, false}}};
  const auto it = types->find(dtype);
  if (it != types->end()) return it->second;
  std::vector<std::string> names;
  for (const auto& [name, type] : *types) names.push_back(name);
  return absl::InvalidArgumentError(absl::StrCat(
      "unknown dtype \"", dtype, "\": it must be one of ", absl::StrJoin(names, ", ")));
}

// Whether `name` is `module` or inside of it.
bool IsIn(absl::string_view name, absl::string_view module) {
  return module.empty() || name == module ||
         (absl::StartsWith(name, module) && name[module.size()] == '.');
}

// The sizes of tensors and modules. Modules are in the order of their first tensor, parameters
// before buffers.
class Sizes {
 public:
  static absl::StatusOr<Sizes> Of(const PlannedModel& model, const SizeOptions& options) {
    Sizes sizes;
    for (const std::vector<std::string>& group : model.tied) {
      for (size_t i = 1; i < group.size(); ++i) sizes.owned_elsewhere_.insert(group[i]);
    }
    sizes.bytes_[""] = 0;
    for (const bool buffers : {false, true}) {
      MUSTER_RETURN_IF_ERROR(sizes.Add(model.root, "", buffers, options));
    }
    return sizes;
  }

  int64_t operator[](const std::string& name) const {
    const auto it = bytes_.find(name);
    return it == bytes_.end() ? 0 : it->second;
  }
  const std::map<std::string, int64_t>& all() const { return bytes_; }
  const std::vector<std::string>& in_order() const { return order_; }
  // Returns the bytes of the buffers of a module and its submodules.
  int64_t BuffersOf(const std::string& module) const {
    int64_t sum = 0;
    for (const auto& [name, bytes] : buffers_) {
      if (IsIn(name, module)) sum += bytes;
    }
    return sum;
  }
  bool IsTensor(const std::string& name) const { return tensors_.contains(name); }

 private:
  absl::Status Add(const PlannedModule& module, const std::string& path, bool buffers,
                   const SizeOptions& options) {
    for (const PlannedTensor& tensor : buffers ? module.buffers : module.parameters) {
      const std::string name = JoinName(path, tensor.name);
      if (!tensors_.insert(name).second) {
        return absl::InvalidArgumentError(absl::StrCat("the model has two tensors ", name));
      }
      MUSTER_ASSIGN_OR_RETURN(const int64_t bytes, BytesOf(name, tensor, options));
      if (owned_elsewhere_.contains(name)) continue;
      if (buffers) buffers_.push_back({name, bytes});
      for (size_t dot = 0; dot != std::string::npos;) {
        const std::string prefix = name.substr(0, dot);
        AddTo(prefix, bytes);
        dot = name.find('.', dot == 0 ? 0 : dot + 1);
      }
      AddTo(name, bytes);
      if (bytes_[""] > kMaxBytes) {
        return absl::InvalidArgumentError(
            absl::StrCat("the model has more than 2^53 bytes, with ", name));
      }
    }
    for (const PlannedModule& child : module.children) {
      MUSTER_RETURN_IF_ERROR(Add(child, JoinName(path, child.name), buffers, options));
    }
    return absl::OkStatus();
  }

  void AddTo(const std::string& name, int64_t bytes) {
    if (bytes_.try_emplace(name, 0).second) order_.push_back(name);
    bytes_[name] += bytes;
  }

  static absl::StatusOr<int64_t> BytesOf(const std::string& name, const PlannedTensor& tensor,
                                         const SizeOptions& options) {
    int64_t elements = 1;
    for (const int64_t dimension : tensor.shape) {
      if (dimension < 0) {
        return absl::InvalidArgumentError(
            absl::StrCat(name, " has a negative dimension, ", dimension));
      }
      if (dimension != 0 && elements > kMaxBytes / dimension) {
        return absl::InvalidArgumentError(absl::StrCat(name, " has more than 2^53 elements"));
      }
      elements *= dimension;
    }
    const auto in_words = [&name](const absl::Status& status) {
      return absl::InvalidArgumentError(absl::StrCat(name, ": ", status.message()));
    };
    const absl::StatusOr<ElementType> own = FindType(tensor.dtype);
    if (!own.ok()) return in_words(own.status());
    int64_t bits = own->bits;
    const auto special = options.special_dtypes.find(name);
    if (special != options.special_dtypes.end()) {
      const absl::StatusOr<ElementType> type = FindType(special->second);
      if (!type.ok()) return in_words(type.status());
      bits = type->bits;
    } else if (options.dtype.has_value()) {
      const absl::StatusOr<ElementType> type = FindType(*options.dtype);
      if (!type.ok()) return type.status();
      if (own->is_float) bits = std::min(bits, type->bits);
    }
    return (elements * bits + 7) / 8;
  }

  std::map<std::string, int64_t> bytes_;
  std::vector<std::string> order_;
  std::vector<std::pair<std::string, int64_t>> buffers_;
  std::set<std::string> tensors_;
  std::set<std::string> owned_elsewhere_;  // the other names of tied tensors
};

// A unit of placement: a module, or a tensor of a module that was divided.
struct Item {
  std::string name;
  const PlannedModule* module;  // null: a tensor
};
using Items = std::deque<Item>;

class Placement {
 public:
  Placement(const PlannedModel& model, DeviceLimits limits, const DeviceMapOptions& options,
            Sizes sizes)
      : model_(model), options_(options), limits_(std::move(limits)), sizes_(std::move(sizes)) {
    if (limits_.empty() || limits_.back().first != "disk") limits_.push_back({"disk", 0});
    for (const auto& [device, limit] : limits_) {
      if (IsGpu(device)) gpus_.push_back(device);
    }
    if (!gpus_.empty() && gpus_.back() == "mps") {
      main_ = {"mps"};
    } else if (!gpus_.empty()) {
      main_ = {gpus_[0], "cpu"};
    } else {
      main_ = {"cpu"};
    }
    // Sort the groups by the order of their owners in the model, whatever their order in the list,
    // because places are tried in that order.
    std::map<std::string, size_t> order;
    for (const std::string& name : sizes_.in_order()) order.emplace(name, order.size());
    tied_ = model.tied;
    const auto place_of = [&order](const std::vector<std::string>& group) {
      const auto place = group.empty() ? order.end() : order.find(group.front());
      return place == order.end() ? order.size() : place->second;
    };
    std::stable_sort(tied_.begin(), tied_.end(),
                     [&](const auto& a, const auto& b) { return place_of(a) < place_of(b); });
    for (std::vector<std::string>& group : tied_) std::sort(group.begin(), group.end());
  }

  DeviceMap Run() {
    items_ = PartsOf("", model_.root);
    FindLargestLayer(/*with_tensors=*/true);
    size_t device = 0;
    while (!items_.empty()) {
      const Item item = items_.front();
      items_.pop_front();
      ForgetLayersOf(item.name);
      if (!PlaceOrSplit(item, limits_[device])) {
        // Move on to the next device, permanently.
        items_.push_front(item);
        ++device;
      }
    }
    DeviceMap map;
    map.buffers_do_not_fit = !options_.offload_buffers && BuffersDoNotFit();
    map.devices = std::move(map_);
    if (options_.clean_result) Clean("", &map.devices);
    return map;
  }

 private:
  static bool IsGpu(absl::string_view device) { return device != "cpu" && device != "disk"; }

  // Returns a module's own parameters, its children, and its own buffers. Accelerate leaves out the
  // buffers of a divided module, so that nothing determines their device (D15).
  Items PartsOf(const std::string& path, const PlannedModule& module) const {
    Items parts;
    for (const PlannedTensor& parameter : module.parameters) {
      parts.push_back({JoinName(path, parameter.name), nullptr});
    }
    for (const PlannedModule& child : module.children) {
      parts.push_back({JoinName(path, child.name), &child});
    }
    for (const PlannedTensor& buffer : module.buffers) {
      parts.push_back({JoinName(path, buffer.name), nullptr});
    }
    return parts;
  }

  bool CanSplit(const Item& item) const {
    return item.module != nullptr && !item.module->children.empty() &&
           !options_.no_split.contains(item.module->class_name);
  }

  // Finds the largest part that must stay whole, among the parts that are still to be placed.
  void FindLargestLayer(bool with_tensors) {
    largest_ = 0;
    layers_.clear();
    Items rest = items_;
    while (!rest.empty()) {
      const Item item = rest.front();
      rest.pop_front();
      if (item.module == nullptr && !with_tensors) continue;
      if (CanSplit(item)) {
        for (auto child = item.module->children.rbegin(); child != item.module->children.rend();
             ++child) {
          rest.push_front({JoinName(item.name, child->name), &*child});
        }
        continue;
      }
      const int64_t bytes = sizes_[item.name];
      if (bytes > largest_) {
        largest_ = bytes;
        layers_.clear();
      }
      if (bytes == largest_) layers_.push_back(item.name);
    }
  }

  void ForgetLayersOf(const std::string& name) {
    std::erase_if(layers_, [&name](const std::string& layer) { return IsIn(layer, name); });
    if (layers_.empty()) FindLargestLayer(/*with_tensors=*/false);
  }

  // The places in `items` that hold a tensor tied to one of `item`, in the order of the groups and
  // of the names in each, and the bytes of these places together with those of the item. As in
  // Accelerate, a place counts once for each such tensor in it, but a tensor whose owner is there
  // counts only once. Tensors that are already placed elsewhere count nothing.
  struct Ties {
    std::vector<size_t> places;
    int64_t bytes = 0;
  };
  Ties TiesOf(const Item& item, const Items& items) const {
    Ties ties;
    ties.bytes = sizes_[item.name];
    const auto inside = [&item](const std::string& name) { return IsIn(name, item.name); };
    for (const std::vector<std::string>& group : tied_) {
      if (std::none_of(group.begin(), group.end(), inside)) continue;
      for (const std::string& name : group) {
        if (inside(name)) continue;
        for (size_t i = 0; i < items.size(); ++i) {
          if (!IsIn(name, items[i].name)) continue;
          ties.bytes += sizes_[items[i].name];
          const bool known =
              std::find(ties.places.begin(), ties.places.end(), i) != ties.places.end();
          if (known) {
            ties.bytes -= sizes_[name];
          } else {
            ties.places.push_back(i);
          }
          break;
        }
      }
    }
    return ties;
  }

  void Assign(const std::string& name, const std::string& device) {
    for (auto& [placed, where] : map_) {
      if (placed != name) continue;
      where = device;
      return;
    }
    map_.push_back({name, device});
  }

  // Returns false if `item` goes to a later device.
  bool PlaceOrSplit(const Item& item, const std::pair<std::string, double>& device) {
    const bool is_disk = device.first == "disk";
    const bool keeps_room = std::find(main_.begin(), main_.end(), device.first) != main_.end();
    const double reserved = keeps_room ? static_cast<double>(largest_) : 0;
    const double limit =
        is_disk ? std::numeric_limits<double>::infinity() : device.second - reserved;
    const auto bytes = static_cast<double>(sizes_[item.name]);
    double& used = used_[device.first];
    const Ties ties = TiesOf(item, items_);
    if (used + static_cast<double>(ties.bytes) <= limit) {
      used += static_cast<double>(ties.bytes);
      Assign(item.name, device.first);
      for (const size_t place : ties.places) Assign(items_[place].name, device.first);
      std::vector<size_t> gone = ties.places;
      std::sort(gone.rbegin(), gone.rend());
      for (const size_t place : gone) items_.erase(items_.begin() + place);
      if (item.module != nullptr) buffers_[device.first] += sizes_.BuffersOf(item.name);
      return true;
    }
    if (!ties.places.empty() && used + bytes <= limit && SplitTied(item, ties)) return true;
    if (used + bytes >= limit && CanSplit(item)) {
      const Items parts = PartsOf(item.name, *item.module);
      items_.insert(items_.begin(), parts.begin(), parts.end());
      FindLargestLayer(/*with_tensors=*/false);
      return true;
    }
    if (used == 0 && options_.fallback_allocation && !is_disk &&
        Hoist(item, device.second - static_cast<double>(std::max(largest_, ties.bytes)))) {
      return true;
    }
    used += reserved;
    return false;
  }

  // Divides the first tied module that can be divided, and tries the item again.
  bool SplitTied(const Item& item, const Ties& ties) {
    for (const size_t place : ties.places) {
      const Item tied = items_[place];
      if (!CanSplit(tied)) continue;
      const Items parts = PartsOf(tied.name, *tied.module);
      items_.erase(items_.begin() + place);
      items_.insert(items_.begin() + place, parts.begin(), parts.end());
      items_.push_front(item);
      FindLargestLayer(/*with_tensors=*/false);
      return true;
    }
    return false;
  }

  // Puts the first later part of at most `limit` bytes before `item`.
  bool Hoist(const Item& item, double limit) {
    // The parts that the search has passed count for ties like those before it.
    Items search = items_, passed = {item};
    while (!search.empty()) {
      const Item candidate = search.front();
      search.pop_front();
      Items others = passed;
      others.insert(others.end(), search.begin(), search.end());
      if (static_cast<double>(TiesOf(candidate, others).bytes) <= limit) {
        items_.push_front(item);
        TakeOut(candidate);
        items_.push_front(candidate);
        return true;
      }
      if (!CanSplit(candidate)) {
        passed.push_back(candidate);
        continue;
      }
      const Items parts = PartsOf(candidate.name, *candidate.module);
      search.insert(search.begin(), parts.begin(), parts.end());
    }
    return false;
  }

  // Removes a part from the list, dividing the modules around it.
  void TakeOut(const Item& part) {
    for (size_t i = 0; i < items_.size();) {
      const Item item = items_[i];
      if (item.name == part.name) {
        items_.erase(items_.begin() + i);
        return;
      }
      if (!IsIn(part.name, item.name)) {
        ++i;
        continue;
      }
      const Items parts = PartsOf(item.name, *item.module);
      items_.erase(items_.begin() + i);
      items_.insert(items_.begin() + i, parts.begin(), parts.end());
    }
  }

  bool BuffersDoNotFit() const {
    const auto of = [](const std::map<std::string, double>& values, const std::string& device) {
      const auto it = values.find(device);
      return it == values.end() ? 0.0 : it->second;
    };
    const double offloaded = of(buffers_, "cpu") + of(buffers_, "disk");
    if (offloaded == 0 || gpus_.empty()) return false;
    return std::none_of(limits_.begin(), limits_.end(), [&](const auto& device) {
      return IsGpu(device.first) && device.second >= offloaded + of(used_, device.first);
    });
  }

  static void Clean(const std::string& module,
                    std::vector<std::pair<std::string, std::string>>* map) {
    const auto inside = [&module](const auto& entry) {
      return module.empty() || (entry.first != module && IsIn(entry.first, module));
    };
    std::set<std::string> devices, children;
    size_t entries = 0;
    for (const auto& entry : *map) {
      if (!inside(entry)) continue;
      ++entries;
      devices.insert(entry.second);
      const size_t begin = module.empty() ? 0 : module.size() + 1;
      children.insert(entry.first.substr(0, entry.first.find('.', begin)));
    }
    if (devices.size() == 1 && entries > 1) {
      const auto first = std::find_if(map->begin(), map->end(), inside);
      const size_t at = first - map->begin();
      const std::string device = first->second;
      std::erase_if(*map, inside);
      map->insert(map->begin() + static_cast<std::ptrdiff_t>(at), {module, device});
      return;
    }
    for (const std::string& child : children) Clean(child, map);
  }

  const PlannedModel& model_;
  const DeviceMapOptions& options_;
  DeviceLimits limits_;  // with the disk
  const Sizes sizes_;
  std::vector<std::string> gpus_;
  std::vector<std::string> main_;  // devices that keep room for the largest layer
  std::vector<std::vector<std::string>> tied_;
  Items items_;
  int64_t largest_ = 0;
  std::vector<std::string> layers_;  // layers of that size
  std::map<std::string, double> used_;
  std::map<std::string, double> buffers_;
  std::vector<std::pair<std::string, std::string>> map_;
};

const PlannedModule* FindModule(const PlannedModule& root, absl::string_view name) {
  if (name.empty()) return &root;
  for (const PlannedModule& child : root.children) {
    if (!IsIn(name, child.name)) continue;
    if (name == child.name) return &child;
    if (const PlannedModule* const found = FindModule(child, name.substr(child.name.size() + 1))) {
      return found;
    }
  }
  return nullptr;
}

std::optional<int> NumberOf(absl::string_view device) {
  int number = 0;
  if (device.empty() || device[0] < '0' || device[0] > '9' || !absl::SimpleAtoi(device, &number)) {
    return std::nullopt;
  }
  return number;
}

// Returns a quarter more than the larger of the largest undivided module and the mean module, so
// that the last device does not get all that did not fit on the others.
int64_t BalanceBuffer(const PlannedModel& model, const Sizes& sizes,
                      const BalanceOptions& options) {
  const std::set<std::string>& no_split = options.no_split;
  int64_t whole = 0;
  std::set<std::string> seen;
  for (const std::string& name : sizes.in_order()) {
    if (name.empty() || sizes.IsTensor(name)) continue;
    const PlannedModule* const module = FindModule(model.root, name);
    if (module == nullptr || !no_split.contains(module->class_name)) continue;
    if (seen.insert(module->class_name).second) whole = std::max(whole, sizes[name]);
  }
  // The mean counts modules that hold tensors and have no submodules that do. Those with such
  // submodules are collected first, because comparing each pair takes an hour for a model with tens
  // of thousands of experts.
  std::set<absl::string_view> with_modules;
  for (const std::string& name : sizes.in_order()) {
    if (sizes.IsTensor(name)) continue;
    for (size_t dot = name.rfind('.'); dot != std::string::npos && dot > 0;
         dot = name.rfind('.', dot - 1)) {
      if (!with_modules.insert(absl::string_view(name).substr(0, dot)).second) break;
    }
  }
  int64_t sum = 0, count = 0;
  for (const std::string& name : sizes.in_order()) {
    if (name.empty() || sizes.IsTensor(name)) continue;
    const bool counts_whole = options.counted_whole.contains(name);
    const bool is_inside =
        !counts_whole &&
        std::any_of(options.counted_whole.begin(), options.counted_whole.end(),
                    [&name](const std::string& whole) { return IsIn(name, whole); });
    if (is_inside) continue;
    if (!counts_whole && with_modules.contains(name)) continue;
    sum += sizes[name];
    ++count;
  }
  const int64_t mean = sum / std::max<int64_t>(count, 1);
  return static_cast<int64_t>(1.25 * static_cast<double>(std::max(whole, mean)));
}

}  // namespace

std::string JoinName(absl::string_view module, absl::string_view name) {
  return module.empty() ? std::string(name) : absl::StrCat(module, ".", name);
}

absl::StatusOr<DeviceLimits> OrderDevices(const DeviceLimits& limits) {
  std::map<std::pair<int, int>, std::pair<std::string, double>> ordered;
  for (const auto& [device, limit] : limits) {
    std::pair<int, int> place;
    if (const std::optional<int> number = NumberOf(device)) {
      place = {0, *number};
    } else if (device == "mps") {
      place = {1, 0};
    } else if (device == "cpu") {
      place = {2, 0};
    } else if (device == "disk") {
      place = {3, 0};
    } else {
      return absl::InvalidArgumentError(
          absl::StrCat("device \"", device,
                       "\" is not recognized: it must be a GPU's number, mps, cpu or disk"));
    }
    if (!(limit >= 0)) {
      return absl::InvalidArgumentError(
          absl::StrCat("the limit of device ", device, " is negative: ", limit));
    }
    if (!ordered.try_emplace(place, device, limit).second) {
      return absl::InvalidArgumentError(absl::StrCat("device ", device, " has two limits"));
    }
  }
  DeviceLimits result;
  for (const auto& [place, entry] : ordered) result.push_back(entry);
  return result;
}

absl::StatusOr<std::map<std::string, int64_t>> ModuleSizes(const PlannedModel& model,
                                                           const SizeOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(const Sizes sizes, Sizes::Of(model, options));
  return sizes.all();
}

absl::StatusOr<DeviceMap> InferDeviceMap(const PlannedModel& model, const DeviceLimits& limits,
                                         const DeviceMapOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(DeviceLimits ordered, OrderDevices(limits));
  MUSTER_ASSIGN_OR_RETURN(Sizes sizes, Sizes::Of(model, options));
  return Placement(model, std::move(ordered), options, std::move(sizes)).Run();
}

namespace {

void AddExpertLists(const PlannedModule& module, const std::string& path,
                    std::set<std::string>* lists) {
  for (const PlannedModule& child : module.children) {
    const std::string name = JoinName(path, child.name);
    if (module.name == "block_sparse_moe" && child.name == "experts") {
      lists->insert(name);
    } else {
      AddExpertLists(child, name, lists);
    }
  }
}

}  // namespace

std::set<std::string> ExpertLists(const PlannedModel& model) {
  std::set<std::string> lists;
  AddExpertLists(model.root, "", &lists);
  return lists;
}

absl::StatusOr<DeviceLimits> BalanceMemory(const PlannedModel& model, const DeviceLimits& limits,
                                           const BalanceOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(DeviceLimits balanced, OrderDevices(limits));
  MUSTER_ASSIGN_OR_RETURN(const Sizes sizes, Sizes::Of(model, options));
  std::vector<std::pair<std::string, double>*> gpus;
  for (auto& entry : balanced) {
    if (NumberOf(entry.first).has_value() && entry.second > 0) gpus.push_back(&entry);
  }
  if (gpus.empty()) return balanced;
  const auto devices = static_cast<int64_t>(gpus.size());
  const bool low_zero = options.low_zero && devices > 1;
  if (devices == 1 && !options.user_set) gpus[0]->second *= 0.9;
  const int64_t total = sizes[""];
  const auto share = static_cast<double>(total / (low_zero ? devices - 1 : devices) +
                                         BalanceBuffer(model, sizes, options));
  const auto is_zero = [](const auto& entry) { return NumberOf(entry.first) == 0; };
  for (size_t i = 0; i + 1 < gpus.size(); ++i) {
    if (!(low_zero && is_zero(*gpus[i]))) gpus[i]->second = std::min(gpus[i]->second, share);
  }
  if (!low_zero) return balanced;
  // The devices 1, 2, ...; if their numbers have gaps, for which Accelerate fails, all other GPUs.
  double others = 0;
  int64_t found = 0;
  for (const auto& [device, limit] : balanced) {
    const std::optional<int> number = NumberOf(device);
    if (!number.has_value() || *number < 1 || *number >= devices) continue;
    others += limit;
    ++found;
  }
  if (found != devices - 1) {
    others = 0;
    for (const auto* const gpu : gpus) others += is_zero(*gpu) ? 0 : gpu->second;
  }
  for (auto& entry : balanced) {
    if (is_zero(entry)) {
      entry.second = std::min(entry.second, std::max(0.0, static_cast<double>(total) - others));
    }
  }
  return balanced;
}

}  // namespace muster
