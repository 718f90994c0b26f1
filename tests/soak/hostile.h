#ifndef MUSTER_TESTS_SOAK_HOSTILE_H_
#define MUSTER_TESTS_SOAK_HOSTILE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/string_view.h"
#include "base/mutex.h"

namespace grpc {
class Channel;
}

namespace muster::soak {

// Hostile clients of a coordinator, all at once, each on its own thread, until it is destroyed:
//   - calls whose message comes at the moment their deadline expires, some milliseconds after their
//     headers;
//   - connections that send noise, half a greeting or nothing, and break off anywhere;
//   - calls and streams that begin and send nothing, by the hundred, some kept and some dropped;
//   - waits that hold large requests, by the dozen, and go away;
//   - frames and requests of random bytes and of mutated messages;
//   - watches of keys and of the health that are opened and dropped.
// They ask in the name of a job that exists. The coordinator may be away at any time.
class Hostile {
 public:
  Hostile(std::string address, std::string job, uint32_t seed);
  ~Hostile();
  Hostile(const Hostile&) = delete;
  Hostile& operator=(const Hostile&) = delete;

  // Returns what was done so far, a word and a number each, to see that it was done.
  std::map<std::string, int64_t> counts() const;

 private:
  void Start(const char* name, void (Hostile::*round)(uint32_t seed));
  void Count(absl::string_view what, int64_t by = 1);
  std::shared_ptr<grpc::Channel> NewChannel() const;

  // Runs one round each.
  void LateMessages(uint32_t seed);
  void Strangers(uint32_t seed);
  void SilentCalls(uint32_t seed);
  void HeldWaits(uint32_t seed);
  void Noise(uint32_t seed);
  void DroppedWatches(uint32_t seed);

  const std::string address_;
  const std::string job_;
  const uint32_t seed_;
  Notification stop_;
  mutable Mutex mu_;
  std::map<std::string, int64_t> counts_ ABSL_GUARDED_BY(mu_);
  std::vector<std::thread> threads_;  // last
};

}  // namespace muster::soak

#endif  // MUSTER_TESTS_SOAK_HOSTILE_H_
