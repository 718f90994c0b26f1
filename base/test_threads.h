#ifndef MUSTER_BASE_TEST_THREADS_H_
#define MUSTER_BASE_TEST_THREADS_H_

namespace muster {

// A system that starts no more threads: a program that links this has a pthread_create of its own.
// For tests.
//
// While it lives, the thread that made it starts so many threads more, and then none (EAGAIN).
// Other threads are not limited.
class ThreadsLeft {
 public:
  explicit ThreadsLeft(int count);
  ~ThreadsLeft();
  ThreadsLeft(const ThreadsLeft&) = delete;
  ThreadsLeft& operator=(const ThreadsLeft&) = delete;

  // How many threads the calling thread has started so far, and was refused.
  static int Started();
  static int Refused();
};

}  // namespace muster

#endif  // MUSTER_BASE_TEST_THREADS_H_
