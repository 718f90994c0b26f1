#include "base/test_threads.h"

#include <errno.h>
#include <pthread.h>

#include "base/test_system_calls.h"

namespace muster {
namespace {

thread_local int left = -1;  // no limit
thread_local int started = 0;
thread_local int refused = 0;

}  // namespace

ThreadsLeft::ThreadsLeft(int count) { left = count; }
ThreadsLeft::~ThreadsLeft() { left = -1; }
int ThreadsLeft::Started() { return started; }
int ThreadsLeft::Refused() { return refused; }

}  // namespace muster

extern "C" int pthread_create(pthread_t* thread, const pthread_attr_t* attributes,
                              void* (*start)(void*), void* argument) noexcept {
  using Create = int (*)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);
  static const auto real = muster::RealCall<Create>("pthread_create");
  if (muster::left == 0) {
    ++muster::refused;
    return EAGAIN;
  }
  if (muster::left > 0) --muster::left;
  ++muster::started;
  return real(thread, attributes, start, argument);
}
