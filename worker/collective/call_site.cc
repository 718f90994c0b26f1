#include "worker/collective/call_site.h"

namespace muster {
namespace {

thread_local const char* current_file = nullptr;
thread_local unsigned current_line = 0;

}  // namespace

CallSite::CallSite(std::source_location where) : outermost_(current_file == nullptr) {
  if (!outermost_) return;
  current_file = where.file_name();
  current_line = where.line();
}

CallSite::CallSite(const SavedCallSite& saved) : outermost_(current_file == nullptr) {
  if (!outermost_) return;
  current_file = saved.file;
  current_line = saved.line;
}

CallSite::~CallSite() {
  if (outermost_) current_file = nullptr;
}

std::string CurrentCallSite() {
  if (current_file == nullptr) return "";
  const std::string path = current_file;
  const size_t slash = path.rfind('/');
  return (slash == std::string::npos ? path : path.substr(slash + 1)) + ":" +
         std::to_string(current_line);
}

SavedCallSite SaveCallSite() { return {current_file, current_line}; }

}  // namespace muster
