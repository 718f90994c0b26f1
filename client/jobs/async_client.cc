#include "client/jobs/async_client.h"

#include <grpcpp/channel.h>

#include <algorithm>
#include <deque>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/time/time.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "client/jobs/client_on_channel.h"

namespace muster {

struct AsyncClient::Call::Operation {
  std::shared_ptr<AsyncClient::Impl> impl;
  client::StoppableClient client;
  bool cancelled = false;  // guarded by the lock of `impl`
  // Joined by the thread that cancels the call, or by the callback thread if the call's own
  // callback does.
  std::thread thread = {};
};

class AsyncClient::Impl : public std::enable_shared_from_this<AsyncClient::Impl> {
 public:
  using Operation = Call::Operation;

  Impl(std::shared_ptr<grpc::Channel> channel, const ClientOptions& options)
      : channel_(std::move(channel)), timeout_(options.timeout), retry_for_(options.retry_for) {
    callbacks_ = std::thread([this] { Callbacks(); });
  }

  std::shared_ptr<Operation> Start(std::function<void(Client&, const Tell&)> work) {
    auto operation = std::make_shared<Operation>(Operation{
        .impl = shared_from_this(), .client = client::StoppableOn(channel_, timeout_, retry_for_)});
    // The thread ends before the operation does, because Cancel joins it. If no thread can be
    // started, this throws, and there is no operation.
    operation->thread = std::thread([this, one = operation.get(), work = std::move(work)] {
      work(one->client.client,
           [this, one](const std::function<void()>& callback) { return RunIt(one, callback); });
    });
    MutexLock lock(&mu_);
    operations_.insert(operation);
    return operation;
  }

  void Cancel(const std::shared_ptr<Operation>& operation) {
    {
      MutexLock lock(&mu_);
      if (operations_.erase(operation) == 0) return;
      operation->cancelled = true;
      changed_.SignalAll();
    }
    operation->client.stop();
    {
      MutexLock lock(&mu_);
      if (running_ == operation.get() && std::this_thread::get_id() == callbacks_.get_id()) {
        // Its thread waits for this callback.
        ended_.push_back(operation);
        return;
      }
      while (running_ == operation.get()) changed_.Wait(&mu_);
    }
    operation->thread.join();
  }

  void End() {
    std::set<std::shared_ptr<Operation>> open;
    {
      MutexLock lock(&mu_);
      MUSTER_CHECK(std::this_thread::get_id() != callbacks_.get_id())
          << "an AsyncClient was destroyed on its callback thread";
      open = operations_;
    }
    for (const auto& operation : open) Cancel(operation);
    {
      MutexLock lock(&mu_);
      ending_ = true;
      changed_.SignalAll();
    }
    callbacks_.join();
  }

 private:
  struct Task {
    Operation* operation;
    const std::function<void()>* callback;
    bool started = false, finished = false;
  };

  bool RunIt(Operation* operation, const std::function<void()>& callback) {
    Task task{operation, &callback};
    MutexLock lock(&mu_);
    if (operation->cancelled) return false;
    tasks_.push_back(&task);
    changed_.SignalAll();
    while (!task.finished && (task.started || !operation->cancelled)) changed_.Wait(&mu_);
    if (!task.started) tasks_.erase(std::find(tasks_.begin(), tasks_.end(), &task));
    return !operation->cancelled;
  }

  void Callbacks() {
    mu_.Lock();
    while (true) {
      const auto next = std::find_if(tasks_.begin(), tasks_.end(),
                                     [](const Task* task) { return !task->operation->cancelled; });
      if (next == tasks_.end()) {
        if (ending_) break;
        changed_.Wait(&mu_);
        continue;
      }
      Task* const task = *next;
      tasks_.erase(next);
      task->started = true;
      running_ = task->operation;
      mu_.Unlock();
      (*task->callback)();
      mu_.Lock();
      running_ = nullptr;
      task->finished = true;
      changed_.SignalAll();
      std::vector<std::shared_ptr<Operation>> ended;
      ended.swap(ended_);
      if (ended.empty()) continue;
      mu_.Unlock();
      for (const auto& operation : ended) operation->thread.join();
      ended.clear();
      mu_.Lock();
    }
    mu_.Unlock();
  }

  const std::shared_ptr<grpc::Channel> channel_;
  const absl::Duration timeout_, retry_for_;
  Mutex mu_;
  CondVar changed_;
  std::set<std::shared_ptr<Operation>> operations_ ABSL_GUARDED_BY(mu_);  // not cancelled
  std::deque<Task*> tasks_ ABSL_GUARDED_BY(mu_);
  Operation* running_ ABSL_GUARDED_BY(mu_) = nullptr;  // the one whose callback runs
  // Cancelled by their own callbacks; the callback thread joins them.
  std::vector<std::shared_ptr<Operation>> ended_ ABSL_GUARDED_BY(mu_);
  bool ending_ ABSL_GUARDED_BY(mu_) = false;
  std::thread callbacks_;
};

void AsyncClient::Call::cancel() {
  const std::shared_ptr<Operation> operation = std::move(operation_);
  operation_ = nullptr;
  if (operation != nullptr) operation->impl->Cancel(operation);
}

absl::StatusOr<AsyncClient> AsyncClient::Connect(const ClientOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(std::shared_ptr<grpc::Channel> channel, client::ConnectChannel(options));
  return AsyncClient(std::make_shared<Impl>(std::move(channel), options));
}

AsyncClient::AsyncClient(std::shared_ptr<Impl> impl) : impl_(std::move(impl)) {}
AsyncClient::AsyncClient(AsyncClient&&) noexcept = default;
AsyncClient& AsyncClient::operator=(AsyncClient&& other) noexcept {
  if (impl_ != nullptr) impl_->End();
  impl_ = std::move(other.impl_);
  return *this;
}
AsyncClient::~AsyncClient() {
  if (impl_ != nullptr) impl_->End();
}

AsyncClient::Call AsyncClient::Start(std::function<void(Client&, const Tell&)> work) {
  return Call(impl_->Start(std::move(work)));
}

AsyncClient::Call AsyncClient::submit(JobSpec spec, SubmitOptions options,
                                      std::function<void(absl::StatusOr<Submission>)> done) {
  return start([spec = std::move(spec), options = std::move(options)](
                   Client& client) { return client.submit(spec, options); },
               std::move(done));
}

AsyncClient::Call AsyncClient::get(std::string job, std::function<void(absl::StatusOr<Job>)> done) {
  return start([job = std::move(job)](Client& client) { return client.get(job); }, std::move(done));
}

AsyncClient::Call AsyncClient::watch(std::string job, std::function<void(const Job&)> changed,
                                     std::function<void(absl::StatusOr<Job>)> done) {
  return Start([=](Client& client, const Tell& tell) {
    absl::StatusOr<Job> end =
        client.watch(job, [&](const Job& now) { return tell([&] { changed(now); }); });
    tell([&] { done(std::move(end)); });
  });
}

AsyncClient::Call AsyncClient::watch_all(ListOptions options,
                                         std::function<void(const JobUpdate&)> changed,
                                         std::function<void(absl::Status)> done) {
  return Start([=](Client& client, const Tell& tell) {
    absl::Status end = client.watch_all(
        options, [&](const JobUpdate& update) { return tell([&] { changed(update); }); });
    tell([&] { done(std::move(end)); });
  });
}

AsyncClient::Call AsyncClient::follow_log(std::string job, LogOptions options,
                                          std::function<void(const LogChunk&)> chunk,
                                          std::function<void(absl::Status)> done) {
  return Start([=](Client& client, const Tell& tell) {
    absl::Status end = client.follow_log(
        job, options, [&](const LogChunk& part) { return tell([&] { chunk(part); }); });
    tell([&] { done(std::move(end)); });
  });
}

}  // namespace muster
