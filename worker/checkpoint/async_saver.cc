#include "worker/checkpoint/async_saver.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/failpoint.h"
#include "base/file.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/thread_priority.h"
#include "c10/util/Exception.h"
#include "worker/checkpoint/agreement.h"
#include "worker/checkpoint/node_group.h"

namespace muster {
namespace {

// One save is copied while another is written.
constexpr int kSnapshots = 2;
// Training comes first where the cores are busy. But this is not the lowest priority: when training
// waits for this work, other processes may be using the cores.
constexpr int kPersistNice = 10;

// The share of time in which all ranks of a node together take a core from training while it wants
// all of them. The number of threads does not matter: the threads of a parallel loop wait for the
// one that is interrupted, and ranks for one another. Training loses about twice this, because
// caches are cold afterwards.
constexpr double kShareOfTime = 0.0125;
// Rests must not make a save take longer than this if the disk does not, because what is not on the
// disk yet is lost with the node.
constexpr absl::Duration kRestsTakeAtMost = absl::Minutes(1);

// Logs at once, because the next call that returns a status may be hours away.
void Log(const AsyncSaver::Outcome& outcome) {
  if (!outcome.status.ok()) {
    MUSTER_LOG(Error) << "the asynchronous save of " << outcome.path
                      << " failed: " << outcome.status.message();
    return;
  }
  MUSTER_LOG(Info) << "saved " << outcome.path << ": training waited "
                   << absl::FormatDuration(absl::Trunc(outcome.stall, absl::Microseconds(100)))
                   << ", written "
                   << absl::FormatDuration(absl::Trunc(outcome.persist, absl::Milliseconds(1)))
                   << " later, " << outcome.bytes << " bytes by rank 0";
}

}  // namespace

AsyncSaver::AsyncSaver(std::unique_ptr<Comm> comm, const Options& options)
    : comm_(std::move(comm)),
      limiter_(options.max_bytes_per_second),
      in_flight_(options.in_flight),
      lazy_(options.lazy),
      rank_(comm_->rank()),
      polite_(options.max_bytes_per_second <= 0),
      writers_(kShareOfTime / std::max(options.local_ranks, 1), options.in_flight) {
  for (int i = 0; i < kSnapshots; ++i) idle_.push_back(std::make_unique<Snapshot>());
  try {
    if (lazy_) copier_ = std::thread([this] { RunCopies(); });
    thread_ = std::thread([this] { Run(); });
  } catch (...) {
    End();
    throw;
  }
}

AsyncSaver::~AsyncSaver() { End(); }

void AsyncSaver::End() {
  limiter_.Lift(true);
  {
    MutexLock lock(&mu_);
    stop_ = true;
    changed_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
  if (copier_.joinable()) copier_.join();
}

class AsyncSaver::Hurry {
 public:
  explicit Hurry(AsyncSaver& saver) : saver_(saver) { saver_.limiter_.Lift(true); }
  ~Hurry() { saver_.limiter_.Lift(saver_.abandoned_); }
  Hurry(const Hurry&) = delete;
  Hurry& operator=(const Hurry&) = delete;

 private:
  AsyncSaver& saver_;
};

std::unique_ptr<Snapshot> AsyncSaver::TakeSnapshot() {
  MutexLock lock(&mu_);
  std::optional<Hurry> hurry;
  if (idle_.empty()) hurry.emplace(*this);
  while (idle_.empty()) changed_.Wait(&mu_);
  // Take the one that was used last: the other needs no memory as long as saves do not overlap.
  std::unique_ptr<Snapshot> snapshot = std::move(idle_.back());
  idle_.pop_back();
  return snapshot;
}

void AsyncSaver::GiveBack(std::unique_ptr<Snapshot> snapshot) {
  snapshot->Clear();
  MutexLock lock(&mu_);
  idle_.push_back(std::move(snapshot));
  changed_.SignalAll();
}

absl::Status AsyncSaver::Begin(Comm& comm, const Request& request,
                               absl::FunctionRef<absl::Status(StateWriter&)> write,
                               std::vector<Outcome>* earlier) {
  const absl::Time start = clock_.Now();
  WaitForCopy();
  auto save = std::make_unique<Save>();
  save->request = request;
  save->snapshot = TakeSnapshot();
  absl::Status copied;
  try {
    copied = Copy(comm, *save, write, earlier);
  } catch (...) {
    GiveBack(std::move(save->snapshot));
    throw;
  }
  if (!copied.ok()) {
    GiveBack(std::move(save->snapshot));
    return copied;
  }
  last_deferred_ = save->deferred;
  save->begun = clock_.Now();
  save->stall = save->begun - start;
  if (SaveProgress* const all = request.publish.progress; all != nullptr) {
    save->progress =
        all->Begin(request.path(), request.info.step, /*asynchronous=*/true, /*logs=*/rank_ == 0);
    save->progress->Expect(save->snapshot->bytes());
  }
  MutexLock lock(&mu_);
  if (lazy_ && !save->deferred->empty()) to_copy_.push_back(save->deferred);
  queue_.push_back(std::move(save));
  ++begun_;
  changed_.SignalAll();
  return absl::OkStatus();
}

absl::Status AsyncSaver::Copy(Comm& comm, Save& save,
                              absl::FunctionRef<absl::Status(StateWriter&)> write,
                              std::vector<Outcome>* earlier) {
  const Request& request = save.request;
  int64_t done = 0;
  if (rank_ == 0) {
    MutexLock lock(&mu_);
    done = done_;
  }
  // The number of saves that have ended as far as rank 0 knows.
  const std::string main = comm.BroadcastBytes(absl::StrCat(done), 0);
  TORCH_CHECK(absl::SimpleAtoi(main, &done), "save_state: rank 0 sent ", main);
  {
    // Wait until this rank's thread has learned what rank 0 knows.
    MutexLock lock(&mu_);
    while (done_ < done) changed_.Wait(&mu_);
    for (int64_t i = done_ - static_cast<int64_t>(outcomes_.size()); i < done; ++i) {
      earlier->push_back(std::move(outcomes_.front()));
      outcomes_.pop_front();
    }
  }
  // A publication that failed on one node may have succeeded on others, so settle the folder again.
  for (const Outcome& outcome : *earlier) {
    if (!outcome.status.ok()) settled_.erase(outcome.path);
  }
  MUSTER_ASSIGN_OR_RETURN(NodeGroups groups, GroupsOf(comm, request.path(), request.node));
  MUSTER_RETURN_IF_ERROR(CheckPublishable(groups, request.publish));
  if (request.dir.empty()) {
    MUSTER_RETURN_IF_ERROR(CheckNumberIsFree(comm, groups, *request.folder, request.info.iteration,
                                             request.total_limit));
  } else if (groups.nodes.size() > 1 && settled_.insert(request.dir).second) {
    {
      // Wait for earlier saves, so that none of them is only partly published meanwhile.
      const Hurry hurry(*this);
      MutexLock lock(&mu_);
      while (done_ < begun_) changed_.Wait(&mu_);
    }
    MUSTER_RETURN_IF_ERROR(SettleNodes(comm, request.dir, groups));
  }
  absl::StatusOr<StagedSave> staged =
      StagedSave::Begin(comm, request.path(), std::move(groups),
                        /*replaces=*/!request.dir.empty(), request.publish.disposal, &folder_mu_);
  MUSTER_RETURN_IF_ERROR(staged.status());
  save.staged.emplace(*std::move(staged));
  const absl::Status copied = GuardRank([&]() -> absl::Status {
    save.snapshot->KeepBy(request.keep);
    StateWriter writer(save.snapshot.get(), rank_, lazy_);
    MUSTER_RETURN_IF_ERROR(write(writer));
    // On a GPU this may fail, which all ranks must learn.
    save.deferred = save.snapshot->TakeDeferred();
    return absl::OkStatus();
  });
  return AgreeOnFiles(comm, copied, {}, nullptr);
}

void AsyncSaver::WaitForCopy() {
  if (last_deferred_ == nullptr) return;
  last_deferred_->RunWhileTrainingWaits(clock_);
  last_deferred_.reset();
}

void AsyncSaver::RunCopies() {
  // If training waits, it does the rest of the work itself.
  LowerThreadPriority(kIdleNice);
  while (true) {
    std::shared_ptr<DeferredCopy> copy;
    {
      MutexLock lock(&mu_);
      while (to_copy_.empty() && !stop_) changed_.Wait(&mu_);
      if (to_copy_.empty()) return;
      copy = std::move(to_copy_.front());
      to_copy_.pop_front();
    }
    MUSTER_FAILPOINT("worker.checkpoint_copy");
    copy->SetDeviceOfThisThread();
    copy->Run();
  }
}

std::vector<AsyncSaver::Outcome> AsyncSaver::Wait() {
  // Training waits meanwhile, and the process may be about to be killed.
  const Hurry hurry(*this);
  MutexLock lock(&mu_);
  while (done_ < begun_) changed_.Wait(&mu_);
  std::vector<Outcome> outcomes(std::make_move_iterator(outcomes_.begin()),
                                std::make_move_iterator(outcomes_.end()));
  outcomes_.clear();
  for (const Outcome& outcome : outcomes) {
    if (!outcome.status.ok()) settled_.erase(outcome.path);
  }
  return outcomes;
}

bool AsyncSaver::Stops() const {
  MutexLock lock(&mu_);
  return stop_;
}

void AsyncSaver::Abandon() {
  abandoned_ = true;
  limiter_.Lift(true);
}

bool AsyncSaver::busy() const {
  MutexLock lock(&mu_);
  return done_ < begun_;
}

bool AsyncSaver::failed() const {
  MutexLock lock(&mu_);
  return std::any_of(outcomes_.begin(), outcomes_.end(),
                     [](const Outcome& outcome) { return !outcome.status.ok(); });
}

PolitePace& AsyncSaver::PaceOfThisThread() const {
  // Most writing threads end when their file is written; the thread of this object continues.
  thread_local std::optional<PolitePace> pace;
  if (!pace.has_value()) pace.emplace(writers_.ShareOfThisThread());
  return *pace;
}

void AsyncSaver::RestIfCoresAreWanted(absl::Duration also, absl::Duration most) {
  if (!polite_) return;
  const std::optional<PolitePace::CpuTimes> times = PolitePace::OfThisThread();
  if (!times.has_value()) return;
  limiter_.Wait(PaceOfThisThread().Rest(*times, clock_.Now(), also, most));
}

absl::Status AsyncSaver::WriteFiles(const Save& save, std::vector<ManifestFile>* files) {
  save.deferred->Wait();
  MUSTER_RETURN_IF_ERROR(save.deferred->status());
  MUSTER_RETURN_IF_ERROR(save.staged->CheckVisible());
  DirectFileOptions options{
      .in_flight = in_flight_, .limiter = &limiter_, .abandoned = &abandoned_};
  if (const auto times = PolitePace::OfThisThread(); polite_ && times.has_value()) {
    PaceOfThisThread().Begin(*times, clock_.Now());
  }
  // The copies had to be made without rests, before the optimizer's step, so the CPU time that they
  // took is made up for here.
  const absl::Duration copied = save.deferred->cpu();
  const double total = static_cast<double>(std::max<uint64_t>(save.snapshot->bytes(), 1));
  options.wrote = [&](uint64_t bytes) {
    if (save.progress != nullptr) save.progress->Wrote(bytes);
    const double part = static_cast<double>(bytes) / total;
    RestIfCoresAreWanted(part * copied, part * writers_.Threads() * kRestsTakeAtMost);
  };
  for (const Snapshot::File& file : save.snapshot->files()) {
    MUSTER_ASSIGN_OR_RETURN(
        DirectFileWritten written,
        save.snapshot->Write(file, JoinPath(save.staged->path(), file.name), options));
    files->push_back(FileOf(file.name, rank_, std::move(written)));
  }
  return absl::OkStatus();
}

absl::Status AsyncSaver::Persist(Save& save) {
  std::vector<ManifestFile> files;
  const absl::Status written = GuardRank([&] { return WriteFiles(save, &files); });
  Publication publication;
  publication.options = save.request.publish;
  publication.options.keep = save.request.total_limit;
  publication.info = save.request.info;
  publication.path = save.request.path();
  if (save.request.dir.empty()) publication.folder = save.request.folder;
  publication.times = [&] {
    return SaveTimes{.stall = save.stall + save.deferred->waited(),
                     .save = clock_.Now() - save.begun + save.stall};
  };
  return save.staged->Publish(*comm_, std::move(publication), written, files);
}

void AsyncSaver::Run() {
  LowerThreadPriority(kPersistNice);
  writers_.WriteFromThisThread();
  while (true) {
    std::unique_ptr<Save> save;
    {
      MutexLock lock(&mu_);
      while (queue_.empty() && !stop_) changed_.Wait(&mu_);
      if (queue_.empty()) return;
      save = std::move(queue_.front());
      queue_.pop_front();
    }
    save->deferred->SetDeviceOfThisThread();
    Outcome outcome;
    outcome.path = save->request.path();
    outcome.bytes = save->snapshot->bytes();
    outcome.stall = save->stall;
    // A lost peer causes an exception of the Comm.
    outcome.status = GuardRank([&] { return Persist(*save); });
    outcome.persist = clock_.Now() - save->begun;
    outcome.stall += save->deferred->waited();
    // Pin for later saves, now that the size is known. Not if no later save will follow, because it
    // may take a second.
    if (outcome.status.ok() && !Stops()) save->snapshot->PinIfFromGpu();
    // Reset before the end is reported, so that the files of a failed save are removed by then.
    save->staged.reset();
    save->progress.reset();
    save->snapshot->Clear();
    // Rank 0 reports an error on which the ranks have agreed. They have not agreed on a lost peer,
    // and there may be no rank 0 any more.
    if (rank_ == 0 || absl::IsInternal(outcome.status)) Log(outcome);
    // Under one lock, so that a thread that gets the memory of a save also learns of its end.
    MutexLock lock(&mu_);
    idle_.push_back(std::move(save->snapshot));
    outcomes_.push_back(std::move(outcome));
    ++done_;
    changed_.SignalAll();
  }
}

}  // namespace muster
