#ifndef MUSTER_WORKER_BIGMODEL_UNIT_ORDER_H_
#define MUSTER_WORKER_BIGMODEL_UNIT_ORDER_H_

#include <cstddef>
#include <map>
#include <utility>
#include <vector>

namespace muster {

// Predicts which units a model uses next, from those that it has used: two units are followed by
// the unit that followed them the last time. Before the first pass, predicts the order of their
// numbers. Pure; not thread-safe.
class UnitOrder {
 public:
  explicit UnitOrder(size_t units) : units_(units) {}

  // Notes that the unit is used. Repetitions do not count.
  void Note(size_t unit);

  // Returns all units that are expected after the last one, in order, each once, without the last
  // one itself.
  std::vector<size_t> Coming() const;

 private:
  static constexpr size_t kNone = static_cast<size_t>(-1);
  size_t After(size_t before, size_t unit) const;

  const size_t units_;
  size_t before_ = kNone, last_ = kNone;
  std::map<std::pair<size_t, size_t>, size_t> after_two_;
  std::map<size_t, size_t> after_one_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_UNIT_ORDER_H_
