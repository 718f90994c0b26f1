#ifndef MUSTER_WORKER_COLLECTIVE_PROCESS_GROUP_H_
#define MUSTER_WORKER_COLLECTIVE_PROCESS_GROUP_H_

#include <chrono>
#include <string>

#include "c10/util/intrusive_ptr.h"

namespace c10d {
class Backend;
class ProcessGroup;
class Store;
}  // namespace c10d

namespace muster {

struct GlooOptions {
  int rank = 0;
  int size = 1;
  // The timeout of every collective and of the meeting. Used as given, whatever the value.
  std::chrono::milliseconds timeout = std::chrono::minutes(10);
  // All ranks are on this host: loopback carries everything.
  bool single_host = false;
  // "host:port" that every rank can reach (the coordinator's or the master's): traffic leaves by
  // the interface that routes towards it. Not contacted. Read if neither single_host nor interface
  // decides.
  std::string towards = "";
  // The name of a network interface ("eth0"); wins over everything else.
  std::string interface = "";
  // Keeps the keys of several groups in one store apart: name and generation of the group.
  std::string name = "world";
};

// Connects a Gloo process group: blocks until all ranks have joined with the same options through
// the same store. CPU tensors only; more backends can be added to it with ProcessGroup::setBackend.
// Throws c10::DistBackendError naming the group, the rank and the address if the ranks cannot meet
// or connect.
c10::intrusive_ptr<c10d::ProcessGroup> MakeGlooGroup(const c10::intrusive_ptr<c10d::Store>& store,
                                                     const GlooOptions& options);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_PROCESS_GROUP_H_
