#include "muster/internal/state_objects.h"

#include <algorithm>
#include <utility>

#include "c10/util/Exception.h"
#include "muster/internal/plain_rows.h"

namespace muster::internal {
namespace {

// Checks the lists after a hook has changed them.
void CheckWeights(const std::vector<NamedTensors>& weights, size_t models, const char* where) {
  TORCH_CHECK(weights.size() == models, "a hook of ", where, " left ", weights.size(),
              " lists of weights for ", models, " models: it may empty a list but not remove it");
}

// A hook may remove itself or others while it runs; removed hooks are not run.
template <class Hook, class... Args>
void RunHooks(const std::map<int64_t, std::shared_ptr<const Hook>>& hooks, const char* where,
              std::vector<NamedTensors>& weights, Args&... args) {
  const size_t models = weights.size();
  const auto all = hooks;
  for (const auto& [id, hook] : all) {
    if (hooks.count(id) == 0) continue;
    (*hook)(weights, args...);
    CheckWeights(weights, models, where);
  }
}

}  // namespace

int64_t StateObjects::Register(std::function<StateDict()> save,
                               std::function<void(const StateDict&)> load,
                               std::shared_ptr<DividedObject> divided,
                               std::optional<std::weak_ptr<const void>> lifetime) {
  TORCH_CHECK(save != nullptr && load != nullptr,
              "register_for_checkpointing() needs both a save and a load function");
  objects_.push_back(
      {next_, std::move(save), std::move(load), std::move(divided), std::move(lifetime)});
  return next_++;
}

int64_t StateObjects::Register(std::function<PlainState()> save,
                               std::function<void(const PlainState&)> load) {
  TORCH_CHECK(save != nullptr && load != nullptr,
              "register_for_checkpointing() needs both a save and a load function");
  return Register(
      [save = std::move(save)] {
        StateDict state;
        PutRows(save(), &state);
        return state;
      },
      [load = std::move(load)](const StateDict& state) { load(Rows(state)); });
}

int64_t StateObjects::AddSaveHook(SaveStateHook hook) {
  TORCH_CHECK(hook != nullptr, "register_save_state_pre_hook() got an empty function");
  save_hooks_.emplace(next_, std::make_shared<const SaveStateHook>(std::move(hook)));
  return next_++;
}

int64_t StateObjects::AddLoadHook(LoadStateHook hook) {
  TORCH_CHECK(hook != nullptr, "register_load_state_pre_hook() got an empty function");
  load_hooks_.emplace(next_, std::make_shared<const LoadStateHook>(std::move(hook)));
  return next_++;
}

void StateObjects::Remove(int64_t id) {
  // Their destructors may call Remove() again, so take them out of the lists first.
  const auto save_hook = save_hooks_.extract(id);
  const auto load_hook = load_hooks_.extract(id);
  const auto at = std::find_if(objects_.begin(), objects_.end(),
                               [&](const Object& object) { return object.number == id; });
  if (at == objects_.end()) return;
  const Object object = std::move(*at);
  objects_.erase(at);
}

void StateObjects::RemoveSince(int64_t number) {
  for (int64_t id = number; id < next_; ++id) Remove(id);
}

void StateObjects::ForgetExpired() {
  std::erase_if(objects_, [](const Object& object) {
    return object.lifetime.has_value() && object.lifetime->expired();
  });
}

bool StateObjects::Has(const Object& object) const {
  return std::any_of(objects_.begin(), objects_.end(),
                     [&](const Object& one) { return one.number == object.number; });
}

std::vector<int64_t> StateObjects::Numbers() const {
  std::vector<int64_t> numbers;
  for (const Object& object : objects_) numbers.push_back(object.number);
  return numbers;
}

void StateObjects::CheckUnchanged(const std::vector<int64_t>& numbers, const char* call) const {
  TORCH_CHECK(
      Numbers() == numbers, call,
      ": a hook has registered or removed an object of the state: do so before or after it");
}

std::optional<size_t> StateObjects::DividedModelOf(size_t index, const Models& models) const {
  if (objects_[index].divided == nullptr) return std::nullopt;
  const std::shared_ptr<ModelSlot> model = objects_[index].divided->model();
  const auto at = std::find(models.begin(), models.end(), model);
  TORCH_CHECK(model != nullptr && at != models.end(), "registered object ", index,
              " belongs to a sharded model that is not prepared any more: keep the prepared model "
              "for as long as its average is registered");
  return static_cast<size_t>(at - models.begin());
}

void StateObjects::RunSaveHooks(std::vector<NamedTensors>& weights, StateWriter& writer) const {
  RunHooks(save_hooks_, "save_state()", weights, writer);
}

void StateObjects::RunLoadHooks(std::vector<NamedTensors>& weights,
                                const StateReader& reader) const {
  RunHooks(load_hooks_, "load_state()", weights, reader);
}

}  // namespace muster::internal
