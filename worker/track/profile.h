#ifndef MUSTER_WORKER_TRACK_PROFILE_H_
#define MUSTER_WORKER_TRACK_PROFILE_H_

#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muster {

// The rule of torch.profiler for which steps are recorded: after the first `skip_first` steps,
// rounds of `wait` steps without the profiler, `warmup` steps whose records are discarded, and
// `active` steps whose records are kept. Stops after `repeat` rounds; 0: never stops.
struct ProfileSchedule {
  int64_t wait = 0;
  int64_t warmup = 0;
  int64_t active = 0;  // 0: no schedule, the whole scope is recorded
  int64_t repeat = 0;
  int64_t skip_first = 0;
};

enum class ProfileAction { kNone, kWarmup, kRecord, kRecordAndSave };

// Returns the profiler's action in step `step`, counted from 0, of a schedule with active > 0.
ProfileAction ProfileActionAt(const ProfileSchedule& schedule, int64_t step);

struct ProfileOptions {
  // The folder for profile_{rank}.json; created if necessary.
  std::string output_dir = ".";
  int rank = 0;
  // Also records the GPU. Needs the CUDA backend to be loaded.
  bool cuda = false;
  bool record_shapes = false;
  bool profile_memory = false;
  bool with_flops = false;
  ProfileSchedule schedule = {};
  // Called with the path of each written trace. An exception becomes the result of Stop().
  std::function<void(const std::string& path)> on_trace_ready = nullptr;
};

// Records what LibTorch does in a scope (also in its backward threads) and writes a Chrome trace
// for chrome://tracing or Perfetto: OUTPUT_DIR/profile_{rank}.json. With a schedule, step() marks
// the end of a training step, and the traces of further rounds are profile_{rank}_1.json,
// profile_{rank}_2.json, ... A process can have only one at a time, from its construction until
// Stop(), also while its schedule waits; use it and end it on the same thread.
//
//   muster::Profile profile({.output_dir = "traces", .rank = accelerator.process_index()});
//   ... some steps ...
//   absl::StatusOr<std::string> path = profile.Stop();
//
// Throws c10::Error if another profile, or LibTorch's profiler, is running, and for a schedule with
// negative numbers or with steps but none active.
class Profile {
 public:
  explicit Profile(ProfileOptions options);

  // Stops, and logs an error instead of returning it.
  ~Profile();
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;

  // Marks the end of a training step; call it after each. Does nothing without a schedule. Stop()
  // reports a trace that cannot be written.
  void step();

  // Ends the recording and writes the whole file. Returns the path of the last trace, or the first
  // error of any, also on every further call. FAILED_PRECONDITION if the schedule reached no
  // recorded step.
  absl::StatusOr<std::string> Stop();

 private:
  enum class Stage { kIdle, kPrepared, kRecording };

  // The right to profile, which only one object of the process can have.
  class Claim {
   public:
    Claim();
    ~Claim();
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;
    void Release();

   private:
    bool held_ = true;
  };

  bool scheduled() const { return options_.schedule.active > 0; }
  void Enter(ProfileAction action);
  // Ends the recording, if there is one, and writes its contents.
  void Finish();
  // Keeps the first error.
  void Fail(const absl::Status& status);

  const ProfileOptions options_;
  Claim claim_;
  bool running_ = true;
  Stage stage_ = Stage::kIdle;
  ProfileAction action_ = ProfileAction::kRecord;
  int64_t step_ = 0;
  int64_t traces_ = 0;
  // The path of the last trace; empty if there is none.
  std::string path_;
  absl::Status error_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRACK_PROFILE_H_
