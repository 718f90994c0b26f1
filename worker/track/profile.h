#ifndef MUSTER_WORKER_TRACK_PROFILE_H_
#define MUSTER_WORKER_TRACK_PROFILE_H_

#include <string>

#include "absl/status/statusor.h"

namespace muster {

struct ProfileOptions {
  // Where profile_{rank}.json goes; made if need be.
  std::string output_dir = ".";
  int rank = 0;
  // Also what the GPU does. Needs the CUDA backend to be loaded.
  bool cuda = false;
  bool record_shapes = false;
  bool profile_memory = false;
  bool with_flops = false;
};

// Records what LibTorch does in a scope (also in its backward threads) and writes a Chrome trace,
// to be opened in chrome://tracing or Perfetto: OUTPUT_DIR/profile_{rank}.json. One at a time in a
// process; use it and end it on one thread.
//
//   muster::Profile profile({.output_dir = "traces", .rank = accelerator.process_index()});
//   ... some steps ...
//   absl::StatusOr<std::string> path = profile.Stop();
//
// Throws c10::Error if another profiler is running.
class Profile {
 public:
  explicit Profile(ProfileOptions options);

  // Stops, and logs an error instead of returning it.
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  // Ends the recording and writes the file whole. Returns its path, again at every further call.
  absl::StatusOr<std::string> Stop();

 private:
  const ProfileOptions options_;
  bool running_ = true;
  absl::StatusOr<std::string> result_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRACK_PROFILE_H_
