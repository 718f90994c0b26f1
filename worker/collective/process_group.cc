#include "worker/collective/process_group.h"

#include "c10/util/Exception.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroupGloo.hpp"
#include "worker/collective/address.h"

namespace muster {

c10::intrusive_ptr<c10d::ProcessGroup> MakeGlooGroup(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const GlooOptions& options) {
  TORCH_CHECK(store, "MakeGlooGroup '", options.name, "': no store");
  TORCH_CHECK(options.size > 0 && options.rank >= 0 && options.rank < options.size,
              "MakeGlooGroup '", options.name, "': there is no rank ", options.rank, " among ",
              options.size);
  TORCH_CHECK(options.timeout.count() > 0, "MakeGlooGroup '", options.name,
              "': the timeout must be positive, not ", options.timeout.count(), " ms");
  std::string where = options.interface.empty() ? "127.0.0.1" : options.interface;
  if (options.interface.empty() && !options.single_host && options.size > 1) {
    TORCH_CHECK(!options.towards.empty(), "MakeGlooGroup '", options.name,
                "': ranks are on several hosts, but neither an interface nor an address to route "
                "towards is given");
    absl::StatusOr<std::string> address = AddressTowards(options.towards);
    TORCH_CHECK(address.ok(), "MakeGlooGroup '", options.name, "' on rank ", options.rank, ": ",
                std::string(address.status().message()));
    where = *address;
  }
  auto prefixed = c10::make_intrusive<c10d::PrefixStore>("muster/group/" + options.name, store);
  try {
    auto gloo_options = c10d::ProcessGroupGloo::Options::create(options.timeout);
    gloo_options->group_name = options.name;
    gloo_options->devices.push_back(
        options.interface.empty()
            ? c10d::ProcessGroupGloo::createDeviceForHostname(where)
            : c10d::ProcessGroupGloo::createDeviceForInterface(options.interface));
    auto backend = c10::make_intrusive<c10d::ProcessGroupGloo>(prefixed, options.rank, options.size,
                                                               gloo_options);
    auto group = c10::make_intrusive<c10d::ProcessGroup>(prefixed, options.rank, options.size);
    group->setBackend(c10::DeviceType::CPU, c10d::ProcessGroup::BackendType::GLOO,
                      c10::static_intrusive_pointer_cast<c10d::Backend>(backend));
    group->setDefaultBackend(c10d::ProcessGroup::BackendType::GLOO);
    group->setGroupName(options.name);
    return group;
  } catch (const c10::Error& e) {
    C10_THROW_ERROR(DistBackendError,
                    c10::str("Gloo group '", options.name, "': rank ", options.rank, " of ",
                             options.size, " at ", where, " could not meet the others within ",
                             options.timeout.count(), " ms: ", e.what_without_backtrace()));
  } catch (const std::exception& e) {
    C10_THROW_ERROR(DistBackendError, c10::str("Gloo group '", options.name, "': rank ",
                                               options.rank, " of ", options.size, " at ", where,
                                               " could not connect to the others: ", e.what()));
  }
}

}  // namespace muster
