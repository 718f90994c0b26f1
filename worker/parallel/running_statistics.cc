#include "worker/parallel/running_statistics.h"

#include <cstddef>
#include <string>

namespace muster {

bool IsUndeclaredStatistic(const c10::Argument& argument) {
  return argument.alias_info() == nullptr &&
         (argument.name() == "running_mean" || argument.name() == "running_var");
}

bool WritesUndeclaredStatistics(const c10::FunctionSchema& schema, const c10::IValue* arguments) {
  for (const char* const reader : {"backward", "functional", "no_update", "no_training"}) {
    if (schema.name().find(reader) != std::string::npos) return false;
  }
  for (size_t i = 0; i < schema.arguments().size(); ++i) {
    const std::string& name = schema.arguments()[i].name();
    const bool is_mode = name == "training" || name == "train" || name == "use_input_stats";
    if (is_mode && arguments[i].isBool()) return arguments[i].toBool();
  }
  return true;
}

}  // namespace muster
