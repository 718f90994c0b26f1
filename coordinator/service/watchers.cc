#include "coordinator/service/watchers.h"

#include <algorithm>
#include <string>

#include "absl/status/statusor.h"
#include "base/failpoint.h"

namespace muster::coordinator {

void Watchers::Open(std::shared_ptr<WatchStream> stream, std::unique_ptr<WatchSource> source) {
  const WatchTopic topic = source->topic();
  Watcher& watcher = watchers_[stream.get()];
  watcher.source = std::move(source);
  of_topic_[topic].insert(stream.get());
  watcher.stream = std::move(stream);
  count_.store(watchers_.size(), std::memory_order_relaxed);
  Send(watcher);
  Changed(topic);
}

void Watchers::Writable(const std::shared_ptr<WatchStream>& stream) {
  const auto it = watchers_.find(stream.get());
  if (it == watchers_.end()) return;
  it->second.writing = false;
  Send(it->second);
}

void Watchers::Forget(WatchStream* stream) {
  const auto it = watchers_.find(stream);
  if (it == watchers_.end()) return;
  const auto of = of_topic_.find(it->second.source->topic());
  of->second.erase(stream);
  if (of->second.empty()) of_topic_.erase(of);
  watchers_.erase(it);
  count_.store(watchers_.size(), std::memory_order_relaxed);
}

void Watchers::CloseAll(const absl::Status& status) {
  for (const auto& [raw, watcher] : watchers_) watcher.stream->Close(status);
  watchers_.clear();
  of_topic_.clear();
  changed_.clear();
  undurable_.clear();
}

void Watchers::Changed(const WatchTopic& topic) {
  if (!of_topic_.contains(topic)) return;
  changed_.push_back(topic);
  const uint64_t revision = core_.last_record_revision();
  if (revision > durable_revision_) undurable_.emplace(revision, topic);
}

void Watchers::Durable(uint64_t revision) {
  durable_revision_ = revision;
  while (!undurable_.empty() && undurable_.begin()->first <= durable_revision_) {
    changed_.push_back(undurable_.begin()->second);
    undurable_.erase(undurable_.begin());
  }
}

void Watchers::Send(Watcher& watcher) {
  if (watcher.writing) return;
  const auto message = watcher.source->Next(core_, durable_revision_, batch_bytes_);
  if (!message.ok()) {
    watcher.writing = true;  // nothing more is written
    watcher.stream->Close(message.status());
    return;
  }
  if (*message == nullptr) return;
  watcher.writing = true;
  MUSTER_FAILPOINT("engine.watch_push");
  watcher.stream->Write(**message);
}

void Watchers::Serve() {
  if (changed_.empty()) return;
  std::sort(changed_.begin(), changed_.end());
  changed_.erase(std::unique(changed_.begin(), changed_.end()), changed_.end());
  for (const WatchTopic& topic : changed_) {
    const auto of = of_topic_.find(topic);
    if (of == of_topic_.end()) continue;
    visited_.fetch_add(of->second.size(), std::memory_order_relaxed);
    for (WatchStream* const stream : of->second) Send(watchers_.find(stream)->second);
  }
  changed_.clear();
}

}  // namespace muster::coordinator
