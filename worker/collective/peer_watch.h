#ifndef MUSTER_WORKER_COLLECTIVE_PEER_WATCH_H_
#define MUSTER_WORKER_COLLECTIVE_PEER_WATCH_H_

#include <chrono>
#include <list>
#include <map>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "c10/util/intrusive_ptr.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace muster {

// Ends messages to and from peers whose connection is lost.
//
// Gloo itself ends only messages of which nothing has been transferred yet: a message that it is
// sending or receiving when the peer dies, or that it is about to send, waits until its own timeout
// (gloo/transport/tcp/pair.cc, signalException and handleRemotePendingRecv). It always ends a
// receive that no message has begun to fill. So this class posts, for each peer, a receive that the
// peer never fills, and a thread checks these receives 20 times a second while a message is waited
// for.
//
// Thread-safe. Messages must be destroyed first.
class PeerWatch {
  // Not owned: a message unregisters its work before it releases it.
  struct Registered {
    int peer;
    c10d::Work* work;
    std::optional<std::chrono::steady_clock::time_point> waited_for_since;
  };

 public:
  // A send or receive under way; the memory from which it is sent or into which it is received is
  // in use until Wait() returns or this is destroyed. Empty by default. Moves like a pointer.
  class Message {
   public:
    Message();
    Message(Message&& other) noexcept;
    Message& operator=(Message&& other) noexcept;
    ~Message();

    int peer() const { return peer_; }
    explicit operator bool() const { return watch_ != nullptr; }

   private:
    friend class PeerWatch;
    PeerWatch* watch_ = nullptr;
    int peer_ = -1;
    c10::intrusive_ptr<c10d::Work> work_;
    std::list<Registered>::iterator place_;
  };

  // Nothing is ever sent under `tag`. A peer may be listed twice, and may have left. `gloo` does
  // the sends and receives. Throws std::system_error if no thread can be started.
  PeerWatch(const c10::intrusive_ptr<c10d::Backend>& gloo, const std::vector<int>& peers, int tag);
  ~PeerWatch();
  PeerWatch(const PeerWatch&) = delete;
  PeerWatch& operator=(const PeerWatch&) = delete;

  // `work`: a send to or a receive from one of the peers, which has just begun.
  Message Add(int peer, c10::intrusive_ptr<c10d::Work> work);
  // Blocks until the message, which must not be empty, has been sent or received; it is empty then.
  // Throws c10::Error or Gloo's exceptions if that does not happen within `timeout`, or if the peer
  // is lost. The other connections stay, except after a timeout: Gloo closes all of them then.
  void Wait(Message* message, std::chrono::milliseconds timeout);
  // Ends all messages that are not complete, including future ones.
  void Abort();
  // Calls Abort() and releases the connections. No messages may be left. Not thread-safe with the
  // destructor.
  void Release();
  // Waits for up to `patience` until the connection to the peer is lost. Everything that the peer
  // sent before is then in memory, and nothing more arrives. Returns Gloo's error, one line;
  // nullopt: the connection is not lost.
  std::optional<std::string> LossOf(int peer, std::chrono::milliseconds patience);

 private:
  struct Peer {
    char nothing = 0;
    c10::intrusive_ptr<c10d::Work> never;  // null once it is released, or if the peer was lost
                                           // before
    std::optional<std::string> loss;
  };

  void Run();
  // Checks the peer's connection, and returns its loss.
  const std::optional<std::string>& Look(int peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Records the loss with the message of the exception that is being handled.
  void Lose(Peer* peer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  Mutex mu_;
  CondVar changed_;
  std::map<int, Peer> peers_ ABSL_GUARDED_BY(mu_);  // by rank
  std::list<Registered> under_way_ ABSL_GUARDED_BY(mu_);
  bool waited_ ABSL_GUARDED_BY(mu_) = false;  // since the thread's last look
  bool asleep_ ABSL_GUARDED_BY(mu_) = false;  // the thread must be woken to look
  bool ending_ ABSL_GUARDED_BY(mu_) = false;  // some messages will never be complete
  bool aborted_ ABSL_GUARDED_BY(mu_) = false;
  bool released_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // last: it uses the rest
};

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_PEER_WATCH_H_
