// Submits a job and follows it: client ADDRESS PROGRAM [ARGS...]. muster/client.h needs no torch.

#include <future>
#include <iostream>
#include <string>
#include <utility>

#include "muster/client.h"

namespace {

void PrintState(const muster::Job& job) {
  std::cout << job.id << " " << muster::JobStateName(job.state) << ": " << job.why << std::endl;
}

absl::Status SubmitAndFollow(const std::string& address, const muster::JobSpec& spec) {
  absl::StatusOr<muster::Client> client = muster::Client::Connect({.address = address});
  if (!client.ok()) return client.status();
  absl::StatusOr<muster::Submission> made = client->submit(spec);
  if (!made.ok()) return made.status();
  std::cout << made->job.id << ": " << made->plan.why << std::endl;

  // Its changes come as callbacks while this thread prints its log.
  absl::StatusOr<muster::AsyncClient> async = muster::AsyncClient::Connect({.address = address});
  if (!async.ok()) return async.status();
  std::promise<absl::StatusOr<muster::Job>> ended;
  const muster::AsyncClient::Call watch =
      async->watch(made->job.id, PrintState,
                   [&](absl::StatusOr<muster::Job> job) { ended.set_value(std::move(job)); });
  absl::Status status = client->follow_log(made->job.id, {}, [](const muster::LogChunk& chunk) {
    std::cout << chunk.data << std::flush;
    return true;
  });
  if (!status.ok()) return status;
  absl::StatusOr<muster::Job> end = ended.get_future().get();
  if (!end.ok()) return end.status();
  return end->state == muster::JobState::kSucceeded ? absl::OkStatus()
                                                    : absl::InternalError(end->why);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::cerr << "usage: client ADDRESS PROGRAM [ARGS...]\n";
    return 2;
  }
  muster::JobSpec spec;
  spec.name = "example";
  spec.command.assign(argv + 2, argv + argc);
  spec.max_restarts = 1;
  const absl::Status status = SubmitAndFollow(argv[1], spec);
  if (status.ok()) return 0;
  std::cerr << status.message() << "\n";
  return 1;
}
