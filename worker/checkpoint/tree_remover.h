#ifndef MUSTER_WORKER_CHECKPOINT_TREE_REMOVER_H_
#define MUSTER_WORKER_CHECKPOINT_TREE_REMOVER_H_

#include <deque>
#include <functional>
#include <string>
#include <thread>

#include "absl/status/status.h"
#include "base/mutex.h"

namespace muster {

// Removes folders beside what its callers do: file systems take a tenth of a second or more for
// each GiB of a checkpoint that goes, for which no training has to wait. Thread-safe.
class TreeRemover {
 public:
  // `remove`: null, or what is called in place of RemoveTree().
  explicit TreeRemover(std::function<absl::Status(const std::string& path)> remove = nullptr);
  // Waits until everything is removed.
  ~TreeRemover();
  TreeRemover(const TreeRemover&) = delete;
  TreeRemover& operator=(const TreeRemover&) = delete;

  // Removes the file or folder at `path`, which nobody looks for under this name any more, and
  // those of earlier calls before it. Does not wait for the disk, unless the system has no thread
  // for it. An error is a warning in the log.
  void Remove(std::string path);

  // Whether something is not removed yet.
  bool busy() const;

  // Blocks until everything is removed, so that its place on the disk is free.
  void Wait();

 private:
  void Run();
  void RemoveNow(const std::string& path) const;

  const std::function<absl::Status(const std::string&)> remove_;
  mutable Mutex mu_;
  CondVar changed_;
  std::deque<std::string> queue_ ABSL_GUARDED_BY(mu_);
  bool removing_ ABSL_GUARDED_BY(mu_) = false;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_ ABSL_GUARDED_BY(mu_);  // from the first removal on
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_TREE_REMOVER_H_
