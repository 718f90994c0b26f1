#ifndef MUSTER_WORKER_PARALLEL_REDUCTION_ORDER_H_
#define MUSTER_WORKER_PARALLEL_REDUCTION_ORDER_H_

#include <cstddef>
#include <cstdint>
#include <vector>

namespace muster {

// The order in which the units of a sharded model are reduced in a backward pass, and when. All
// ranks reduce in one order, whatever order their gradients come in: that of rank 0's first
// backward pass. Until that pass is over, it is the reverse of the order in which rank 0's forward
// pass has used the units.
//
//   reductions.BeginPass();
//   if (reductions.Arrive(unit)) ...                        // for each gradient
//   while (reductions.NextIsComplete()) Reduce(reductions.Next());
//
// Knows only the numbers of units and of their gradients. Not thread-safe.
class ReductionOrder {
 public:
  explicit ReductionOrder(size_t units);

  // Unit `unit` gets `gradients` gradients in a backward pass. A unit that gets none counts as
  // complete, and the caller does not reduce it.
  void Expect(size_t unit, int gradients) { units_[unit].expected = gradients; }
  bool ExpectsAny(size_t unit) const { return units_[unit].expected > 0; }

  // Before the first pass: FirstProposal() returns all units in the reverse of the order in which
  // the forward pass first used them, followed by those that it has not used, the last one first.
  // When the ranks have agreed on rank 0's proposal, each passes it to TakeFirst().
  std::vector<uint32_t> FirstProposal(const std::vector<uint32_t>& used) const;
  void TakeFirst(const std::vector<uint32_t>& order);
  // At the end of the first pass: Proposal() returns pairs of a unit and of the turn at which it is
  // due, in the order in which the units were complete. `once`: a unit that has got more gradients
  // afterwards waits for the end of a pass from now on. Take() sets the agreed order.
  std::vector<uint32_t> Proposal(bool once) const;
  void Take(const std::vector<uint32_t>& order);
  // Whether the first pass is over, so that the order is known.
  bool known() const { return known_; }
  // From now on `unit` is reduced last, at the end of the pass.
  void MoveToTheEnd(size_t unit);

  void BeginPass();
  // A gradient of `unit` has arrived. Returns whether the unit is complete with it.
  bool Arrive(size_t unit);
  // The optimizer uses a gradient of `unit` that has arrived. Returns whether it is late: the unit
  // was reduced before.
  bool NoteUsed(size_t unit);
  // Units with late gradients, in ascending order.
  std::vector<uint32_t> Late() const;

  // Whether this backward pass has turned to `unit`. Units that are due at a turn (NextIsDue) are
  // reduced before it.
  bool HasTurnedTo(size_t unit) const { return units_[unit].turned_to; }
  void TurnTo(size_t unit);
  void ForgetTurns();

  // Whether the next unit has all of its gradients.
  bool NextIsComplete() const;
  // Whether the next unit must be reduced at this turn, complete or not. So the gathers and
  // reductions of all ranks are in one order, even if a rank leaves a parameter out or turns to a
  // unit again.
  bool NextIsDue() const { return next_ < order_.size() && due_[next_] <= turns_; }
  // In the first pass: the end of the units in the order that have all the gradients that this rank
  // will have.
  size_t Complete() const;
  // Takes the next unit.
  size_t Next();
  // How many units are taken, and how many there are.
  size_t taken() const { return next_; }
  size_t size() const { return order_.size(); }

 private:
  struct Unit {
    int expected = 0, arrived = 0;
    bool complete = false, taken = false, late = false, turned_to = false;
  };
  struct Completed {
    size_t unit = 0;
    uint32_t turn = 0;
  };

  std::vector<Unit> units_;
  std::vector<size_t> order_;
  std::vector<uint32_t> due_;  // the turn at which each unit of order_ is due
  bool known_ = false;
  std::vector<Completed> completed_;  // in this pass
  uint32_t turns_ = 0;                // units that this pass has turned to
  size_t next_ = 0;                   // in order_
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_REDUCTION_ORDER_H_
