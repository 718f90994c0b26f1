#ifndef MUSTER_COORDINATOR_SERVICE_RUNNER_LIMITS_H_
#define MUSTER_COORDINATOR_SERVICE_RUNNER_LIMITS_H_

#include <cstddef>

namespace muster::coordinator {

// What clients can make the coordinator's process hold, at most. It refuses the excess with
// OVERLOADED before it changes anything, or stops reading the stream.
struct RunnerLimits {
  // The largest message that is sent. A larger answer is replaced by LIMIT or, if the operation has
  // changed something, by RESULT_TOO_LARGE.
  size_t answer_bytes = (4 << 20) - 1024;
  // Calls that wait for their answer: in total, and per agent. A hub is one agent here: with 400
  // workers behind it, each has room for 160 calls, and for 160 KiB of requests below, where a
  // worker rarely has more than a barrier and a wait at a time.
  size_t calls = 1 << 20;
  size_t calls_of_agent = 1 << 16;
  // Bytes of the requests of those calls: the core keeps what it needs of them (keys waited for,
  // payloads of barriers). For all agents, for one, and for all direct callers, who then cannot
  // use up the agents' share. Small calls, as those of a rendezvous are, may go to twice as much.
  size_t held_bytes_of_agents = 512 << 20;
  size_t held_bytes_of_agent = 64 << 20;
  size_t held_bytes_of_callers = 128 << 20;
  // Requests of unary calls that wait to be applied. An agent has at most one frame there.
  size_t queued_bytes = 64 << 20;
  // Answers that an agent's stream has not taken: from then on no frame of it is read.
  size_t unsent_bytes = 8 << 20;
  // Answers that an agent has not acknowledged: its session ends.
  size_t unacknowledged_bytes = 64 << 20;
  // Records that the disk has not taken. Beyond this, operations that need the journal are refused;
  // beyond twice as much, all that change anything.
  size_t journal_backlog_bytes = 64 << 20;
  // Open watches.
  size_t watchers = 1 << 16;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_RUNNER_LIMITS_H_
