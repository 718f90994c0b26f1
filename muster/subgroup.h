#ifndef MUSTER_SUBGROUP_H_
#define MUSTER_SUBGROUP_H_

#include <functional>
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
// processes they throw c10::Error, and in all inside join_uneven_inputs(). A value type: copies
// refer to the same group. Keep the Accelerator alive. Not thread-safe.
class Subgroup {
 public:
  Subgroup() = default;
  // `comm` null: this process is not a member. `check` throws where members may not take part in
  // the collective that it is given the name of.
  Subgroup(std::shared_ptr<Comm> comm, std::function<void(const char* call)> check)
      : comm_(std::move(comm)), check_(std::move(check)) {}

  bool is_member() const { return comm_ != nullptr; }
  int num_processes() const { return comm().size(); }
  int process_index() const { return comm().rank(); }

  // (collective) See the methods of the same names in Accelerator.
  template <class T>
  [[nodiscard]] T gather(const T& value,
                         std::source_location where = std::source_location::current()) const {
    return Gather(CommFor("gather() of a group"), value, where);
  }
  template <class T>
  [[nodiscard]] auto gather_object(
      const T& object, std::source_location where = std::source_location::current()) const {
    return GatherObject(CommFor("gather_object() of a group"), object, where);
  }
  template <class T>
  [[nodiscard("reduce() returns the result and leaves its argument as it is")]] T reduce(
      const T& value, const std::string& reduction = "sum", double scale = 1.0,
      std::source_location where = std::source_location::current()) const {
    return Reduce(CommFor("reduce() of a group"), value, reduction, scale, where);
  }
  template <class T>
  [[nodiscard("broadcast() returns the result and leaves its argument as it is")]] T broadcast(
      const T& value, int from_process = 0,
      std::source_location where = std::source_location::current()) const {
    Comm& comm = CommFor("broadcast() of a group");
    return Broadcast(
        comm, MapTensors(value, [](const at::Tensor& t) { return t.defined() ? t.clone() : t; }),
        from_process, where);
  }
  void wait_for_everyone() const { CommFor("wait_for_everyone() of a group").Barrier(); }

  Comm& comm() const {
    TORCH_CHECK(
        comm_ != nullptr,
        "this process is not a member of the group: check is_member() before its collectives");
    return *comm_;
  }

 private:
  Comm& CommFor(const char* call) const {
    Comm& mine = comm();
    check_(call);
    return mine;
  }

  std::shared_ptr<Comm> comm_;
  std::function<void(const char*)> check_;
};

}  // namespace muster

#endif  // MUSTER_SUBGROUP_H_
