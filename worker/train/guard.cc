#include "worker/train/guard.h"

#include <cxxabi.h>

#include <cstdlib>
#include <exception>
#include <new>
#include <string>
#include <typeinfo>
#include <utility>

namespace muster {

StatusError::StatusError(absl::Status status)
    : c10::Error(status.ToString()), status_(std::move(status)) {}

absl::Status StatusOfCurrentException() {
  try {
    throw;
  } catch (const StatusError& error) {
    return error.status();
  } catch (const c10::DistError& error) {
    return absl::UnavailableError(error.what_without_backtrace());
  } catch (const c10::OutOfMemoryError& error) {
    return absl::ResourceExhaustedError(error.what_without_backtrace());
  } catch (const c10::ValueError& error) {
    return absl::InvalidArgumentError(error.what_without_backtrace());
  } catch (const c10::IndexError& error) {
    return absl::InvalidArgumentError(error.what_without_backtrace());
  } catch (const c10::TypeError& error) {
    return absl::InvalidArgumentError(error.what_without_backtrace());
  } catch (const c10::NotImplementedError& error) {
    return absl::UnimplementedError(error.what_without_backtrace());
  } catch (const c10::Error& error) {
    return absl::InternalError(error.what_without_backtrace());
  } catch (const std::bad_alloc& error) {
    return absl::ResourceExhaustedError("out of host memory");
  } catch (const std::exception& error) {
    return absl::InternalError(error.what());
  } catch (...) {
    int failed = 1;
    const std::type_info* const type = abi::__cxa_current_exception_type();
    char* const name =
        type == nullptr ? nullptr : abi::__cxa_demangle(type->name(), nullptr, nullptr, &failed);
    std::string text = "an exception that is not derived from std::exception";
    if (failed == 0) text += std::string(", of type ") + name;
    std::free(name);
    return absl::InternalError(text);
  }
}

absl::Status Guard(absl::FunctionRef<void()> tensor_code) {
  try {
    tensor_code();
    return absl::OkStatus();
  } catch (...) {
    return StatusOfCurrentException();
  }
}

void ThrowIfError(const absl::Status& status) {
  if (!status.ok()) throw StatusError(status);
}

}  // namespace muster
