#ifndef MUSTER_CLIENT_JOBS_ASYNC_CLIENT_H_
#define MUSTER_CLIENT_JOBS_ASYNC_CLIENT_H_

#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/jobs/job_client.h"
#include "client/jobs/job_types.h"

namespace muster {

// A Client with callbacks: calls return at once, and their results arrive on the callback thread,
// which the AsyncClient owns. Callbacks therefore never run concurrently, and a slow one delays all
// others. A stream (watch, watch_all, follow_log) makes its next callback when the previous one has
// returned: nothing is queued for a slow callback.
//
// Thread-safe; so is the use of several AsyncClients. Its destruction ends all its calls and must
// not happen on its callback thread. `done` receives errors as the Status that the call of Client
// returns. A call for which the system has no thread throws std::system_error, and has not begun.
class AsyncClient {
 public:
  // A call in progress. Keep it: the call ends when it is destroyed. Not thread-safe.
  class Call {
   public:
    Call() = default;
    Call(Call&&) noexcept = default;
    Call& operator=(Call&& other) noexcept {
      cancel();
      operation_ = std::move(other.operation_);
      return *this;
    }
    ~Call() { cancel(); }

    // Stops the call; the coordinator may already have done what it was asked to do. After cancel()
    // returns, no callback of the call runs or begins. From within a callback of the same call it
    // returns at once, and that callback is the last. Repeatable.
    void cancel();

   private:
    friend class AsyncClient;
    struct Operation;
    explicit Call(std::shared_ptr<Operation> operation) : operation_(std::move(operation)) {}
    std::shared_ptr<Operation> operation_;
  };

  // Like Client::Connect; blocks.
  static absl::StatusOr<AsyncClient> Connect(const ClientOptions& options);
  AsyncClient(AsyncClient&&) noexcept;
  AsyncClient& operator=(AsyncClient&&) noexcept;
  ~AsyncClient();

  // Starts any use of a Client: `work(client)` runs on a thread of the call, then `done(result)` on
  // the callback thread. For example
  //
  //     cancelled = async.start([](Client& client) { return client.cancel("mnist-1"); },
  //                             [](absl::StatusOr<Job> job) { ... });
  template <typename Work, typename Done>
  [[nodiscard]] Call start(Work work, Done done) {
    return Start(
        [work = std::move(work), done = std::move(done)](Client& client, const Tell& tell) {
          auto result = work(client);
          tell([&] { done(std::move(result)); });
        });
  }

  [[nodiscard]] Call submit(JobSpec spec, SubmitOptions options,
                            std::function<void(absl::StatusOr<Submission>)> done);
  [[nodiscard]] Call get(std::string job, std::function<void(absl::StatusOr<Job>)> done);
  // Calls `changed` until the job has ended, then `done`.
  [[nodiscard]] Call watch(std::string job, std::function<void(const Job&)> changed,
                           std::function<void(absl::StatusOr<Job>)> done);
  // Calls `changed` until the call is cancelled; calls `done` with the error that ends it.
  [[nodiscard]] Call watch_all(ListOptions options, std::function<void(const JobUpdate&)> changed,
                               std::function<void(absl::Status)> done);
  [[nodiscard]] Call follow_log(std::string job, LogOptions options,
                                std::function<void(const LogChunk&)> chunk,
                                std::function<void(absl::Status)> done);

 private:
  // Runs a callback and returns after it has returned; false: the call is cancelled.
  using Tell = std::function<bool(const std::function<void()>&)>;
  class Impl;

  explicit AsyncClient(std::shared_ptr<Impl> impl);
  Call Start(std::function<void(Client&, const Tell&)> work);

  std::shared_ptr<Impl> impl_;
};

}  // namespace muster

#endif  // MUSTER_CLIENT_JOBS_ASYNC_CLIENT_H_
