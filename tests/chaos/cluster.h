#ifndef MUSTER_TESTS_CHAOS_CLUSTER_H_
#define MUSTER_TESTS_CHAOS_CLUSTER_H_

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "agent/process.h"
#include "base/defaults.h"
#include "base/mutex.h"
#include "rpc/test_listener.h"
#include "tests/chaos/child.h"
#include "tests/chaos/watcher.h"

namespace muster::chaos {

// The target of a signal, other than a worker by its number.
inline constexpr int kCoordinator = -1;
constexpr int TargetOfAgent(int agent) { return -2 - agent; }
constexpr int TargetOfHub(int hub) { return -1000 - hub; }

// Sends a signal and calls `action` when worker `worker` has printed "round ROUND" and all agents
// that can be behind a hub have printed `once_agents_say`.
struct SignalAt {
  int worker = 0;
  int round = 0;
  int target = kCoordinator;
  int signal = 0;  // 0: none
  // If the signal is SIGSTOP: how long after it SIGCONT follows.
  absl::Duration stopped_for = {};
  std::function<void()> action = {};
  std::string once_agents_say = {};
};

// The course of one run.
struct Plan {
  std::string name = {};
  int workers = 2;
  // 0: workers reach the coordinator on their own, and are started by the test. Otherwise this many
  // muster-agents share them out evenly, start them and speak for them.
  int agents = 0;
  // With agents: how many agents of jobs of their own are attached before the others start and
  // offer themselves as hubs; and whether the job's first agent does too.
  int hubs = 0;
  bool first_agent_is_hub = false;
  // With agents: whether the workers are tests/chaos/training, which trains with LibTorch, in
  // epochs for rounds; otherwise they are chaos_worker.
  bool trains = false;
  int rounds = 20;
  absl::Duration lease = absl::Seconds(5);
  // The outage tolerance of chaos_worker.
  absl::Duration outage_tolerance = kDefaultOutageTolerance;
  // MUSTER_FAILPOINTS of the coordinator's first, second, ... start; later starts have none.
  std::vector<std::string> coordinator_failpoints = {};
  // The same for the workers; with agents each start of an agent hands its own to one of its
  // workers.
  std::map<int, std::vector<std::string>> worker_failpoints = {};
  std::map<int, std::vector<std::string>> agent_failpoints = {};
  std::vector<SignalAt> signals = {};
  std::vector<std::string> coordinator_flags = {};
  std::map<std::string, std::string> coordinator_env = {}, worker_env = {};
  // The words before the coordinator's command line, such as {"/usr/bin/prlimit", ...}.
  std::vector<std::string> coordinator_prefix = {};
  std::string data_dir = {};  // empty: in the run's own folder
  bool watch = true;
  // chaos_worker waits for each of its own writes to come back in a watch.
  bool workers_watch = false;
  // How long the coordinator stays away when it has died, and what a worker must say meanwhile.
  absl::Duration outage = {};
  std::string said_in_outage = {};
  // Whether a caller goes away while the coordinator holds its call.
  bool abandons = false;
  // The first time the coordinator dies, another process holds its port until the coordinator was
  // refused it.
  bool port_is_stolen = false;
  // A fault in the test: the journal is removed before the coordinator is started again.
  bool journal_is_lost = false;
  int expected_generations = 0;  // 0: any number
  absl::Duration timeout = absl::Seconds(60);
};

// A coordinator with its journal on disk, agents or none, workers and a watcher, as real processes.
// A process that dies is started again: the coordinator on the same port and journal, an agent or a
// worker as a new process. Run() returns what was wrong, one line each; empty: nothing. It checks
// that
//   - every worker came to its end, every armed failpoint fired,
//   - no acknowledged write is lost and none was done twice, before and after one more restart,
//   - no barrier instance had two results, no trigger was acted upon on two steps,
//   - all workers end with the same weights, those of chaos_worker with the ones of a run that
//     nothing disturbs,
//   - the watch missed nothing,
//   - the journal verifies, the coordinator stops on SIGTERM, and no process or socket is left.
class Cluster {
 public:
  explicit Cluster(Plan plan);
  ~Cluster();

  std::vector<std::string> Run();
  // Returns everything that the processes wrote, for a failure's message.
  std::string Logs() const;
  // The weights that all workers printed in the end.
  const std::string& weights() const { return weights_; }
  // Returns what the first worker printed after `prefix`; empty: nothing.
  std::string SaidByFirst(const std::string& prefix) const;
  // The folder of this run: run/ is the project of workers that train. It is deleted with this
  // object if nothing was wrong.
  const std::string& dir() const { return dir_; }
  int coordinator_starts() const { return static_cast<int>(coordinators_.size()); }
  const std::string& address() const { return address_; }
  Child& coordinator() { return *coordinators_.back(); }
  // Returns the newest start of each agent.
  std::vector<pid_t> AgentPids() const;

 private:
  struct History {
    int begun = 0, acked = 0, refused = 0;
    int64_t last_value = 0;
    int starts = 0;
  };

  void StartCoordinator();
  void StartWorker(int index);
  void StartAgent(int index);
  void StartHub(int index);
  int AgentOf(int worker) const { return worker * plan_.agents / plan_.workers; }
  // Returns the process whose output has that worker's, which begins with `prefix` there.
  const Child& Speaker(int worker, std::string* prefix) const;
  std::optional<pid_t> PidOf(int target) const;
  bool AllEnded() const;
  bool RestartCoordinator();  // these: false: something ended that must not
  bool RestartWorkers();
  bool JobHasEnded() const;
  bool RestartAgents();
  bool RestartHubs();
  void EndHubs();
  // Waits for something to happen, at most until `deadline`.
  void WaitForChange(absl::Time deadline);
  void SendDueSignals();
  void ContinueStopped();
  bool RestartWhatEnded();
  void CallAndGoAway();
  void CheckFired();
  void CheckHistories(const std::map<std::string, int64_t>& values);
  void CheckStops();
  void CheckWeights();
  void CheckNothingIsLeft();
  absl::StatusOr<std::map<std::string, int64_t>> ReadCounters();
  // Returns false if fewer than `agents` agents were attached in time.
  bool WaitForAgents(int agents, absl::Time deadline);
  void Wrong(std::string what) { wrong_.push_back(std::move(what)); }

  const Plan plan_;
  const std::string dir_;
  const std::string data_dir_;
  const std::string socket_dir_;  // short: a socket's path has 107 bytes at most
  const int port_;
  const std::string address_;

  Mutex mu_;
  CondVar changed_;
  uint64_t changes_ ABSL_GUARDED_BY(mu_) = 0;
  uint64_t seen_changes_ = 0;

  std::vector<std::unique_ptr<Child>> coordinators_;          // one for each start
  std::vector<std::vector<std::unique_ptr<Child>>> workers_;  // by index, one for each start
  std::vector<std::vector<std::unique_ptr<Child>>> agents_;   // likewise; empty: there are none
  std::vector<std::vector<std::unique_ptr<Child>>> hubs_;     // likewise
  bool hubs_may_end_ = false;                                 // the job has ended
  absl::Time coordinator_due_ = absl::InfinitePast();         // an outage ends
  std::string weights_;
  std::vector<bool> sent_;
  std::unique_ptr<rpc::TestListener> thief_;  // holds the port
  std::multimap<absl::Time, pid_t> to_continue_;
  std::map<pid_t, bool> stop_seen_;
  std::unique_ptr<Watcher> watcher_;
  std::vector<std::string> wrong_;
  std::unique_ptr<agent::ProcessHost> host_;  // last: ends what still runs
};

}  // namespace muster::chaos

#endif  // MUSTER_TESTS_CHAOS_CLUSTER_H_
