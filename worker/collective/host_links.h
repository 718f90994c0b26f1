#ifndef MUSTER_WORKER_COLLECTIVE_HOST_LINKS_H_
#define MUSTER_WORKER_COLLECTIVE_HOST_LINKS_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "c10/util/intrusive_ptr.h"
#include "worker/collective/peer_watch.h"

namespace c10d {
class Backend;
class Work;
}  // namespace c10d

namespace muster {

// Messages between this rank and its peers on other hosts, by send and receive of a Gloo backend
// that others use, too: tags from kFirstTag on belong to these links only.
//
// A rank for which a collective has failed sends its peers the reason and closes the connections,
// so that no caller waits for it; an error contains that reason, or names the peer that died or did
// not come. Gloo's connections are unusable afterwards. One thread at a time, except for Break().
class HostLinks {
 public:
  static constexpr int kFirstTag = 0x7f000000;
  // Messages from one rank to another under one tag arrive in the order in which they were sent.
  static constexpr int kTags = 0x00ffff00;

  // A message on its way; the memory from which it is sent or into which it is received is in use
  // until Wait(). Empty: nothing to move.
  using Message = PeerWatch::Message;

  // `rank` and `peers`: those of the backend's group. Begins to listen for reasons.
  HostLinks(c10::intrusive_ptr<c10d::Backend> gloo, int rank, std::vector<int> peers);
  ~HostLinks();
  HostLinks(const HostLinks&) = delete;
  HostLinks& operator=(const HostLinks&) = delete;

  const std::vector<int>& peers() const { return peers_; }

  // Begin to send and receive `bytes`; `tag` is below kTags. `what` is for messages.
  Message Send(int peer, int tag, const void* data, int64_t bytes, const std::string& what);
  Message Receive(int peer, int tag, void* data, int64_t bytes, const std::string& what);
  // Blocks until the message has been sent or received. Throws a c10::DistBackendError that names
  // the peer.
  void Wait(Message& message, std::chrono::steady_clock::time_point deadline,
            const std::string& what);

  // Makes all current and future calls fail, here and on the peers, which receive `why`. The first
  // reason is kept. May be called from any thread.
  void Break(const std::string& why);
  // Throws if the links are broken.
  void ThrowIfBroken(const std::string& what) const;

 private:
  static constexpr int kReasonBytes = 512;

  template <class Start>
  Message Begin(int peer, const void* data, int64_t bytes, const std::string& what, Start start);
  [[noreturn]] void Fail(int peer, bool late, const std::string& error, const std::string& what);

  const c10::intrusive_ptr<c10d::Backend> gloo_;
  const int rank_;
  const std::vector<int> peers_;
  // The reasons that peers sent before they closed their connections, by peer. Gloo writes into
  // these buffers until the connection is lost.
  std::map<int, std::vector<char>> reasons_;
  std::vector<c10::intrusive_ptr<c10d::Work>> reasons_to_come_;
  PeerWatch watch_;
  mutable Mutex mu_;
  std::string broken_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_HOST_LINKS_H_
