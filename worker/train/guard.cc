#include "worker/train/guard.h"

#include <exception>
#include <new>
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
    return absl::InternalError("an exception of unknown type");
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
