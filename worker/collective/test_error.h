#ifndef MUSTER_WORKER_COLLECTIVE_TEST_ERROR_H_
#define MUSTER_WORKER_COLLECTIVE_TEST_ERROR_H_

#include <string>

#include "c10/util/Exception.h"

namespace muster {

// The message of the c10::Error that `fn` throws, or "no error". For tests.
template <typename Fn>
std::string ErrorOf(Fn fn) {
  try {
    fn();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "no error";
}

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_TEST_ERROR_H_
