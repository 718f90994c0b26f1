#ifndef MUSTER_WORKER_CHECKPOINT_DISPOSAL_H_
#define MUSTER_WORKER_CHECKPOINT_DISPOSAL_H_

#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "base/mutex.h"
#include "base/owned_fd.h"

namespace muster {

// Removes folders and frees memory in the background, in the order of the calls. That takes a tenth
// of a second or more for each GiB, for which training does not have to wait. Thread-safe.
class Disposal {
 public:
  // `remove`: called instead of RemoveCheckpointTree(), unless null.
  explicit Disposal(std::function<absl::Status(const std::string& path)> remove = nullptr);
  // Waits until all is done.
  ~Disposal();
  Disposal(const Disposal&) = delete;
  Disposal& operator=(const Disposal&) = delete;

  // Returns the object of this process, which exists as long as the process: one program after
  // another saves into one folder, and each waits for what the previous one removes. A program that
  // returns from main() or calls exit() waits for it, too.
  static Disposal& OfProcess();

  // Removes the file or folder at `path`, a name that nothing uses any more. Does not block on the
  // disk, unless the system has no thread for it. Errors are logged as warnings. `lock`: closed
  // afterwards.
  void Remove(std::string path, OwnedFd lock = OwnedFd());

  // Releases `memory`, perhaps as its last owner.
  void Free(std::shared_ptr<const void> memory);

  // Whether something is still to be done.
  bool busy() const;

  // Blocks until all is done, so that its place on the disk or in memory is free.
  void Wait();

 private:
  struct Item {
    std::string path;  // empty: `memory` is released
    std::shared_ptr<const void> memory;
    OwnedFd lock;
  };
  void Add(Item item);
  void Run();
  void Do(Item item) const;

  const std::function<absl::Status(const std::string&)> remove_;
  mutable Mutex mu_;
  CondVar changed_;
  std::deque<Item> queue_ ABSL_GUARDED_BY(mu_);
  bool working_ ABSL_GUARDED_BY(mu_) = false;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mu_);  // started by the first item
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_DISPOSAL_H_
