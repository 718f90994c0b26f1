#ifndef MUSTER_SUBGROUP_H_
#define MUSTER_SUBGROUP_H_

#include <memory>
#include <source_location>
#include <string>
#include <utility>

#include "c10/util/Exception.h"
#include "worker/collective/comm.h"
#include "worker/collective/nested_collectives.h"
#include "worker/nested/nested.h"

namespace muster {

// A subset of the job's processes, for collectives among them; returned by
// Accelerator::new_group(). Process indices count within the group, in the job's order. Every
// member must call the methods marked (collective), in the same order; they block. In other
// processes they throw c10::Error. A value type: copies refer to the same group. Keep the
// Accelerator alive. Not thread-safe.
class Subgroup {
 public:
  Subgroup() = default;
  // Null: this process is not a member.
  explicit Subgroup(std::shared_ptr<Comm> comm) : comm_(std::move(comm)) {}

  bool is_member() const { return comm_ != nullptr; }
  int num_processes() const { return comm().size(); }
  int process_index() const { return comm().rank(); }

  // (collective) See the methods of the same names in Accelerator.
  template <class T>
  T gather(const T& value, std::source_location where = std::source_location::current()) const {
    return Gather(comm(), value, where);
  }
  template <class T>
  auto gather_object(const T& object,
                     std::source_location where = std::source_location::current()) const {
    return GatherObject(comm(), object, where);
  }
  template <class T>
  T reduce(const T& value, const std::string& reduction = "sum", double scale = 1.0,
           std::source_location where = std::source_location::current()) const {
    return Reduce(comm(), value, reduction, scale, where);
  }
  template <class T>
  T broadcast(const T& value, int from_process = 0,
              std::source_location where = std::source_location::current()) const {
    return Broadcast(
        comm(), MapTensors(value, [](const at::Tensor& t) { return t.defined() ? t.clone() : t; }),
        from_process, where);
  }
  void wait_for_everyone() const { comm().Barrier(); }

  Comm& comm() const {
    TORCH_CHECK(
        comm_ != nullptr,
        "this process is not a member of the group: check is_member() before its collectives");
    return *comm_;
  }

 private:
  std::shared_ptr<Comm> comm_;
};

}  // namespace muster

#endif  // MUSTER_SUBGROUP_H_
