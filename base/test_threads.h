#ifndef MUSTER_BASE_TEST_THREADS_H_
#define MUSTER_BASE_TEST_THREADS_H_

namespace muster {

// Limits the threads that the system starts: a program that links this library has its own
// pthread_create. For tests.
// While an object lives, the thread that made it can start as many threads as the constructor says,
// and then none (EAGAIN). Other threads are not limited.
class ThreadsLeft {
 public:
  explicit ThreadsLeft(int count);
  ~ThreadsLeft();
  ThreadsLeft(const ThreadsLeft&) = delete;
  ThreadsLeft& operator=(const ThreadsLeft&) = delete;

  // How many threads the calling thread has started so far, and how many were refused.
  static int Started();
  static int Refused();
};

}  // namespace muster

#endif  // MUSTER_BASE_TEST_THREADS_H_
