#include "muster/handles.h"

#include "muster/internal/slots.h"

namespace muster {

void AcceleratedOptimizer::step() { slot()->Step(); }
at::Tensor AcceleratedOptimizer::step(const std::function<at::Tensor()>& closure) {
  return slot()->StepWithClosure(closure);
}
void AcceleratedOptimizer::zero_grad(bool set_to_none) { slot()->ZeroGrad(set_to_none); }
bool AcceleratedOptimizer::step_was_skipped() const { return slot()->step_was_skipped(); }
int64_t AcceleratedOptimizer::num_groups() const { return slot()->handle().num_groups(); }
double AcceleratedOptimizer::lr(int64_t group) const { return handle_of(group).lr(group); }
void AcceleratedOptimizer::set_lr(double lr) {
  for (int64_t group = 0; group < num_groups(); ++group) set_lr(lr, group);
}
void AcceleratedOptimizer::set_lr(double lr, int64_t group) { handle_of(group).set_lr(group, lr); }
int64_t AcceleratedOptimizer::steps() const { return slot()->steps(); }
OptimizerHandle& AcceleratedOptimizer::handle() { return slot()->handle(); }

OptimizerHandle& AcceleratedOptimizer::handle_of(int64_t group) const {
  OptimizerHandle& handle = slot()->handle();
  TORCH_CHECK(group >= 0 && group < handle.num_groups(), "the optimizer has ", handle.num_groups(),
              " parameter groups, none with number ", group);
  return handle;
}

namespace internal {

double ScheduleHandle::last_lr() const { return slot()->last_lr(); }
std::vector<double> ScheduleHandle::get_last_lr() const { return slot()->last_lrs(); }
int64_t ScheduleHandle::step_count() const { return slot()->step_count(); }

}  // namespace internal

void AcceleratedScheduler::step() { slot()->Step(); }
void AcceleratedPlateau::step(double metric) { slot()->StepMetric(metric); }

}  // namespace muster
