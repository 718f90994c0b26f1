// Preloaded into a program: its wall clock is off by the seconds in the file $MUSTER_CHAOS_CLOCK
// (8 bytes, read at every clock call). Its monotonic clock is untouched.
#include <dlfcn.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdlib>

namespace {

int64_t Offset() {
  static const std::atomic<int64_t>* const offset = [] {
    static std::atomic<int64_t> none{0};
    const char* const path = getenv("MUSTER_CHAOS_CLOCK");
    const int fd = path == nullptr ? -1 : open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return static_cast<const std::atomic<int64_t>*>(&none);
    void* const page = mmap(nullptr, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    return page == MAP_FAILED ? &none : static_cast<const std::atomic<int64_t>*>(page);
  }();
  return offset->load();
}

}  // namespace

extern "C" {

int clock_gettime(clockid_t id, timespec* now) {
  using Function = int (*)(clockid_t, timespec*);
  static const Function real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "clock_gettime"));
  const int result = real(id, now);
  if (result == 0 && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) now->tv_sec += Offset();
  return result;
}

int gettimeofday(timeval* now, void*) noexcept {
  timespec precise;
  if (clock_gettime(CLOCK_REALTIME, &precise) != 0) return -1;
  now->tv_sec = precise.tv_sec;
  now->tv_usec = precise.tv_nsec / 1000;
  return 0;
}

time_t time(time_t* out) noexcept {
  timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  if (out != nullptr) *out = now.tv_sec;
  return now.tv_sec;
}

}  // extern "C"
