#ifndef MUSTER_BASE_THREAD_PRIORITY_H_
#define MUSTER_BASE_THREAD_PRIORITY_H_

namespace muster {

// The nice value of a thread that gets a core only if no other thread needs it, apart from about a
// hundredth of the core.
inline constexpr int kIdleNice = 19;

// Gives the calling thread this nice value, 0 to 19, which the threads that it starts inherit. It
// keeps its priority where the system refuses. Raising the priority again needs privileges, so
// other threads must be able to do themselves whatever work of this thread they wait for.
void LowerThreadPriority(int nice);

}  // namespace muster

#endif  // MUSTER_BASE_THREAD_PRIORITY_H_
