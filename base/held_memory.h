#ifndef MUSTER_BASE_HELD_MEMORY_H_
#define MUSTER_BASE_HELD_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/owned_fd.h"

namespace muster {

// Memory that outlives the process that fills it: files in memory (memfd) whose descriptors the
// node's agent holds. The worker and the agent talk over a unix socket in the abstract namespace,
// one request per connection. This file has what both sides share; MemoryHolder
// (agent/memory_holder.h) is the agent's side.

// The most pieces of memory (slots) that a worker has, numbered from 0.
inline constexpr int kHeldSlots = 32;

// Creates a file in memory that can grow but never shrink, so that a reader's mapping stays valid.
// Errors: with the kernel's message.
absl::StatusOr<OwnedFd> CreateHoldableMemory(const std::string& name);

// Returns INVALID_ARGUMENT unless `fd` is such a file.
absl::Status CheckHoldableMemory(int fd);

// Gives the agent a share of `fd`, in place of what this worker gave it as `slot` before. Errors:
// UNAVAILABLE no agent listens at `socket`; PERMISSION_DENIED this process is not one of the
// agent's workers; INVALID_ARGUMENT the agent cannot hold this file. `worker_id`: where this
// process speaks for several workers, the one that gives it.
absl::Status HoldMemory(const std::string& socket, int slot, int fd,
                        const std::string& worker_id = "");

struct HeldMemory {
  std::string worker_id;  // the worker that gave it
  int slot = 0;
  OwnedFd fd;
};

// Returns the memory that the agent holds for all workers of this node and for earlier attempts of
// the job. Errors: as HoldMemory.
absl::StatusOr<std::vector<HeldMemory>> TakeHeldMemory(const std::string& socket);

// Drops what a worker that does not run on this node now has left in a slot. Errors: as HoldMemory.
absl::Status DropHeldMemory(const std::string& socket, const std::string& worker_id, int slot);

// What a worker can do when another process of its job is lost. The worker tells its agent through
// the same socket.
enum class Reentry : int32_t {
  kNone = 0,  // it ends and has to be started again; also assumed of a worker that reports nothing
  kAble = 1,  // it continues in its process, in the next generation
  kReturned =
      2,  // it has given up what belongs to the generation that has ended, and joins the next
};

// Tells the agent. Errors: as HoldMemory; INVALID_ARGUMENT also from an older agent.
absl::Status TellReentry(const std::string& socket, Reentry reentry);

// --- The wire. A request and each answer is one packet. ---

struct HeldMemoryMessage {
  enum Kind : uint32_t {
    kHold = 1,     // with a descriptor
    kTake = 2,     // answered by kMemory for each piece, then kDone
    kMemory = 3,   // with a descriptor
    kDone = 4,     // `code` is the result
    kDrop = 5,     // for the worker in `text`
    kReentry = 6,  // `slot` is a Reentry
  };
  static constexpr uint32_t kMagic = 0x314d484d;

  uint32_t magic = kMagic;
  uint32_t kind = 0;
  int32_t slot = 0;
  int32_t code = 0;     // an absl::StatusCode
  char text[240] = {};  // the worker's id or the error; ends with a NUL

  void set_text(absl::string_view value);
};

// Returns whether every field is within its range. Checks nothing else.
bool IsWellFormed(const HeldMemoryMessage& message);

// Waits for room. Errors: UNAVAILABLE.
absl::Status SendHeldMemoryMessage(int socket, const HeldMemoryMessage& message, int fd = -1);
// Waits for a message; `fd` gets the descriptor that came along, if one did. Errors: UNAVAILABLE
// the other side has closed or is silent for longer than the socket's timeout; INVALID_ARGUMENT for
// anything but a message.
absl::StatusOr<HeldMemoryMessage> ReceiveHeldMemoryMessage(int socket, OwnedFd* fd);

// Writes the address of the abstract socket `name`, for bind() and connect(): {family, path}.
// Returns its length; 0: the name is too long.
size_t AbstractAddress(const std::string& name, void* sockaddr_un_out);

}  // namespace muster

#endif  // MUSTER_BASE_HELD_MEMORY_H_
