#ifndef MUSTER_AGENT_AGENTS_JOB_H_
#define MUSTER_AGENT_AGENTS_JOB_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "agent/attempt_state.h"
#include "agent/job_coordination.h"
#include "agent/op_sender.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::agent {

// One agent's operations on the job that the agents of a job's machines form at the coordinator,
// "JOB.agents". It has
// - the key "finished", which outlives the generations: it names the last one whose machines were
//   all done, so an agent that waits for a place can read it;
// - the barrier "finish", where agents arrive whose workers are all done;
// - in each generation the keys "settings", "count/RANK", "done" (the workers of a machine are
//   done, so from now on the attempt ends for no newcomer), and "end", why the attempt ended.
//   They are deleted with the generation.
// Calls block, and return early when the launch is cancelled or the attempt has ended, as each
// says: with CANCELLED or ABORTED. Other errors: UNAVAILABLE no answer in time; those of the
// coordinator. Thread-safe, except that Sit is not called while another thread calls anything.
class AgentsJob {
 public:
  using Until = AttemptState::Until;
  // What happens to an operation for whose answer nothing waits any longer: it is dropped if it was
  // not sent yet, or it is carried out when the coordinator is back.
  enum class Late { kForgotten, kHeld };

  struct Options {
    std::string coordinator;  // its address, for messages
    std::string job;          // whose agents form this job
    std::string worker_id;    // of this agent
    uint64_t incarnation = 0;
  };
  // `sender`: borrowed.
  AgentsJob(const Options& options, OpSender* sender, std::shared_ptr<AttemptState> attempt);

  // The name of the agents' job.
  const std::string& name() const { return name_; }
  const std::string& worker_id() const { return worker_id_; }
  // 0: this agent has never had a seat.
  uint64_t generation() const { return generation_; }

  // This agent has got a seat in a generation.
  void Sit(const v1::JoinReply& reply);

  v1::Fence Fence();
  std::string EndKey() const { return prefix_ + "end"; }
  std::string CountKey(int rank) const;
  std::string SettingsKey() const { return prefix_ + "settings"; }
  // Operations that put a key, and that wait until keys exist.
  v1::Op Put(const std::string& key, const std::string& value);
  v1::Op Wait(const std::vector<std::string>& keys, absl::Duration timeout);

  absl::StatusOr<v1::OpResult> Call(v1::Op op, absl::Duration timeout, Until until,
                                    Late late = Late::kForgotten);
  // Does the same, until cancelled, but asks every `period` whether `stop`; returns nullopt if so.
  std::optional<absl::StatusOr<v1::OpResult>> CallUnless(const std::function<bool()>& stop,
                                                         absl::Duration period, v1::Op op,
                                                         absl::Duration timeout);

  // Returns the agents that have a place in the job, and those that wait for one.
  absl::StatusOr<std::vector<v1::Member>> Machines(Until until);
  // Returns the settings of all generations, as they were written.
  absl::StatusOr<std::vector<std::string>> AllSettings();

  // Returns the value of the key "finished"; empty: the job has never finished; nullopt: not known.
  std::optional<std::string> Finished();
  void WriteFinished();
  // Returns once the workers of all machines are done. `rank`: of this machine.
  absl::Status AwaitAll(int rank);
  // Returns whether all machines have passed the barrier "finish".
  bool AllHavePassed();

  // Writes that the workers of this machine are done. ABORTED: the attempt has ended; if the key
  // says why, so does the AttemptState.
  absl::Status WriteDone();
  // Writes why the attempt ends. Returns what the key says, if another agent was first; the end
  // itself if this one was. The operation is carried out even if the answer does not come in time.
  absl::StatusOr<AttemptEnd> WriteEnd(const AttemptEnd& end, absl::Duration timeout);
  // Ends the attempt unless a machine is done or the attempt has ended: a single operation, because
  // a job that has succeeded must not begin again. Returns false if the attempt continues, or ends
  // for another reason.
  bool WriteEndUnlessDone(const AttemptEnd& end);

  // Ends the generation in which this agent has a seat, if no other agent has.
  void EndGeneration(absl::string_view reason, absl::Duration timeout, Until until);
  void Leave(absl::Duration timeout);

 private:
  struct Pending {
    uint64_t op_id = 0;
    std::shared_ptr<AttemptState::Answer> answer = std::make_shared<AttemptState::Answer>();
  };
  Pending Submit(v1::Op op);
  absl::Status NoAnswer(absl::Duration timeout) const;
  std::string DoneKey() const { return prefix_ + "done"; }
  // Puts a key unless one of `absent` exists; then gets the key "end".
  v1::Op PutUnless(const std::vector<std::string>& absent, const std::string& key,
                   const std::string& value);

  const std::string coordinator_;
  const std::string name_;
  const std::string worker_id_;
  const uint64_t incarnation_;
  OpSender* const sender_;
  const std::shared_ptr<AttemptState> attempt_;

  // Written by Sit.
  uint64_t generation_ = 0;
  std::string prefix_;  // of the generation's keys

  std::atomic<uint64_t> last_request_{0};
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_AGENTS_JOB_H_
