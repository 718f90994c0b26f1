// Submits a job and follows it: client ADDRESS PROGRAM [ARGS...]. muster/client.h needs no torch.

#include <iostream>
#include <string>

#include "muster/client.h"

namespace {

absl::Status SubmitAndFollow(const std::string& address, const muster::JobSpec& spec) {
  absl::StatusOr<muster::Client> client = muster::Client::Connect({.address = address});
  if (!client.ok()) return client.status();
  absl::StatusOr<muster::Submission> made = client->submit(spec);
  if (!made.ok()) return made.status();
  std::cout << made->job.id << ": " << made->plan.why << std::endl;
  absl::Status status = client->follow_log(made->job.id, {}, [](const muster::LogChunk& chunk) {
    std::cout << chunk.data << std::flush;
    return true;
  });
  if (!status.ok()) return status;
  absl::StatusOr<muster::Job> end = client->wait(made->job.id);
  if (!end.ok()) return end.status();
  std::cout << end->id << " " << muster::JobStateName(end->state) << ": " << end->why << std::endl;
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
