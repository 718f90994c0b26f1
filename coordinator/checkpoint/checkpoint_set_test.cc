#include "coordinator/checkpoint/checkpoint_set.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/signature.h"
#include "coordinator/checkpoint/chain.h"

namespace muster::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

class CheckpointSetTest : public ::testing::Test {
 protected:
  explicit CheckpointSetTest(CheckpointSet::Signer sign = nullptr)
      : set_("job", nullptr, {}, std::move(sign)) {}

  uint64_t Begin(const std::string& path, int64_t step, int ranks = 2, int keep = 0,
                 bool hold_back = false, int64_t keep_every = 0) {
    v1::BeginCheckpointRequest request;
    request.set_path(path);
    request.set_staging(path + ".tmp-1");
    request.set_step(step);
    request.set_plan_digest(7);
    request.set_ranks(ranks);
    request.set_keep(keep);
    request.set_keep_every(keep_every);
    request.set_hold_back(hold_back);
    v1::BeginCheckpointReply reply;
    error_ = set_.Begin(request, generation_, next_id_++, &reply, &changes_);
    return reply.checkpoint_id();
  }
  // Rank `rank` has its half of tensor "w" in a file of its own.
  std::string Report(uint64_t id, int rank, int ranks = 2, int part = 0, bool last = true) {
    v1::ReportShardsRequest request;
    request.set_checkpoint_id(id);
    request.set_rank(rank);
    request.set_part(part);
    request.set_last(last);
    v1::ShardFile* const file = request.add_files();
    file->set_name(absl::StrCat("w_", rank, "_", part));
    file->set_bytes(100);
    file->set_xxh3(std::string(32, 'a'));
    v1::TensorSlice* const slice = file->add_slices();
    slice->set_tensor("w");
    slice->set_dtype("F32");
    slice->add_global_shape(ranks);
    slice->add_offset(rank);
    slice->add_extent(1);
    return Message(set_.Report(request));
  }
  std::string Seal(uint64_t id) {
    v1::SealCheckpointRequest request;
    request.set_checkpoint_id(id);
    request.set_created_unix_us(1'790'000'000'000'000);
    sealed_.Clear();
    return Message(set_.Seal(request, &sealed_, &changes_));
  }
  std::vector<uint64_t> Publish(uint64_t id) {
    v1::PublishCheckpointRequest request;
    request.set_checkpoint_id(id);
    v1::PublishCheckpointReply reply;
    error_ = set_.Publish(request, &reply, &changes_);
    std::vector<uint64_t> ids;
    for (const auto& record : reply.to_delete()) ids.push_back(record.checkpoint_id());
    return ids;
  }
  // Saves a whole checkpoint.
  uint64_t Save(const std::string& path, int64_t step, int keep = 0, bool hold_back = false,
                int64_t keep_every = 0) {
    const uint64_t id = Begin(path, step, 1, keep, hold_back, keep_every);
    EXPECT_EQ(Report(id, 0, 1), "");
    EXPECT_EQ(Seal(id), "");
    to_delete_ = Publish(id);
    EXPECT_EQ(error_, std::nullopt);
    return id;
  }
  std::string Mark(uint64_t id, v1::MarkCheckpointRequest::Mark mark) {
    v1::MarkCheckpointRequest request;
    request.set_checkpoint_id(id);
    request.set_mark(mark);
    v1::MarkCheckpointReply reply;
    return Message(set_.Mark(request, &reply, &changes_));
  }
  // Verifies the checkpoint that was sealed last, unless `sha256` says otherwise.
  std::string Verify(uint64_t id, const std::string& damage,
                     v1::VerifyDepth depth = v1::VERIFY_CONTENTS, std::string sha256 = "") {
    v1::ListCheckpointsReply all;
    set_.List({}, &all);
    for (const auto& record : all.checkpoints()) {
      if (record.checkpoint_id() == id && sha256.empty()) sha256 = record.sha256();
    }
    v1::VerifyCheckpointRequest request;
    request.set_checkpoint_id(id);
    request.set_depth(depth);
    request.set_sha256(sha256);
    request.set_damage(damage);
    request.set_verified_unix_us(1'790'000'000'000'000 + at_);
    verified_.Clear();
    return Message(set_.Verify(request, &verified_, &changes_));
  }
  std::string Deleted(std::vector<uint64_t> ids) {
    v1::CheckpointDeletedRequest request;
    for (const uint64_t id : ids) request.add_checkpoint_ids(id);
    return Message(set_.Deleted(request, &changes_));
  }
  // Returns 0 if there is none.
  uint64_t Resolve(bool any = false) {
    v1::ResolveCheckpointRequest request;
    request.set_any(any);
    resolved_.Clear();
    error_ = set_.Resolve(request, &resolved_);
    return resolved_.checkpoint().checkpoint_id();
  }
  std::vector<uint64_t> Ids() {
    v1::ListCheckpointsReply reply;
    set_.List({}, &reply);
    std::vector<uint64_t> ids;
    for (const auto& record : reply.checkpoints()) ids.push_back(record.checkpoint_id());
    return ids;
  }
  static std::string Message(const CheckpointSet::Error& error) {
    return error.has_value() ? error->message() : "";
  }

  CheckpointSet set_;
  uint64_t generation_ = 1;
  uint64_t next_id_ = 10;
  CheckpointSet::Changes changes_;
  CheckpointSet::Error error_;
  v1::SealCheckpointReply sealed_;
  v1::ResolveCheckpointReply resolved_;
  uint64_t at_ = 0;  // when files are read, microseconds after some time
  v1::VerifyCheckpointReply verified_;
  std::vector<uint64_t> to_delete_;
};

TEST_F(CheckpointSetTest, AllRanksReport_IsSealedThenPublished) {
  const uint64_t id = Begin("/ckpt/1", 100);
  EXPECT_EQ(Begin("/ckpt/1", 100), id) << "the other rank gets the same one";
  EXPECT_EQ(Report(id, 0), "");
  EXPECT_THAT(Seal(id), AllOf(HasSubstr("\"/ckpt/1\", step 100"),
                              HasSubstr("1 of 2 ranks have not reported"), HasSubstr("ranks 1")));
  EXPECT_EQ(Report(id, 1), "");
  EXPECT_EQ(Resolve(), 0u) << "nothing is sealed";
  EXPECT_EQ(Seal(id), "");
  EXPECT_EQ(sealed_.checkpoint().files(), 2);
  EXPECT_EQ(sealed_.checkpoint().bytes(), 200u);
  EXPECT_EQ(Resolve(), 0u);
  EXPECT_THAT(resolved_.unpublished(), SizeIs(1)) << "whole, but not under its name";
  EXPECT_THAT(Publish(id), IsEmpty());
  EXPECT_EQ(Resolve(), id);
  EXPECT_THAT(resolved_.unpublished(), IsEmpty());
}

TEST_F(CheckpointSetTest, RepeatsOfEachStep_ChangeNothing) {
  const uint64_t id = Begin("/ckpt/1", 100, 1);
  EXPECT_EQ(Report(id, 0, 1, 0, /*last=*/false), "");
  EXPECT_EQ(Report(id, 0, 1, 0, /*last=*/false), "") << "the answer was lost";
  v1::ReportShardsRequest empty;
  empty.set_checkpoint_id(id);
  empty.set_part(1);
  empty.set_last(true);
  EXPECT_EQ(Message(set_.Report(empty)), "");
  EXPECT_EQ(Seal(id), "");
  const std::string first = sealed_.SerializeAsString();
  const size_t changes = changes_.size();
  EXPECT_EQ(Seal(id), "");
  EXPECT_EQ(sealed_.SerializeAsString(), first);
  EXPECT_EQ(Report(id, 0, 1), "") << "late, and known";
  Publish(id);
  Publish(id);
  EXPECT_EQ(error_, std::nullopt);
  EXPECT_EQ(changes_.size(), changes + 1);
}

TEST_F(CheckpointSetTest, ShardsThatDoNotCoverATensor_AreNotSealed) {
  const uint64_t id = Begin("/ckpt/1", 100, 1);
  EXPECT_EQ(Report(id, 0, /*ranks=*/3), "") << "a third of the tensor";
  EXPECT_THAT(Seal(id), HasSubstr("tensor \"w\" of [3]: the files have 1 of its 3 elements"));
  EXPECT_EQ(set_.head_sha256(), "");
}

TEST_F(CheckpointSetTest, RanksThatDisagree_AreRefusedAndNamed) {
  const uint64_t id = Begin("/ckpt/1", 100);
  Begin("/ckpt/1", 101);
  EXPECT_THAT(Message(error_), AllOf(HasSubstr("step 100"), HasSubstr("begins step 101"),
                                     HasSubstr("same state at the same step")));
  EXPECT_EQ(error_->detail().reason(), v1::ERROR_REASON_CHECKPOINT_CONFLICT);
  EXPECT_EQ(Report(id, 0), "");
  EXPECT_THAT(Report(id, 1, /*ranks=*/5), HasSubstr("of [5] here and \"F32\" of [2]"));
  EXPECT_EQ(Report(id, 1), "") << "nothing of the refused part was kept";
  EXPECT_EQ(Seal(id), "");
}

TEST_F(CheckpointSetTest, ReportThatIsWrong_IsRefused) {
  const uint64_t id = Begin("/ckpt/1", 100);
  EXPECT_THAT(Report(id, 2), HasSubstr("its ranks are 0 to 1"));
  EXPECT_THAT(Report(id, -1), HasSubstr("its ranks are 0 to 1"));
  EXPECT_THAT(Report(id, 0, 2, 1), HasSubstr("comes before part 0"));
  EXPECT_THAT(Report(99, 0), HasSubstr("no checkpoint 99"));
  const auto file = [&](const std::string& name, const std::string& digest) {
    v1::ReportShardsRequest request;
    request.set_checkpoint_id(id);
    request.add_files()->set_name(name);
    request.mutable_files(0)->set_xxh3(digest);
    return Message(set_.Report(request));
  };
  const std::string good(32, '0');
  for (const char* name : {"", ".", "..", "a/b", "../x", "a\nb"}) {
    EXPECT_THAT(file(name, good), HasSubstr("not a plain file name")) << name;
  }
  EXPECT_THAT(file("a", "00"), HasSubstr("32 hexadecimal digits"));
  EXPECT_THAT(file("a", std::string(32, 'G')), HasSubstr("32 hexadecimal digits"));
  EXPECT_EQ(Report(id, 0), "");
  v1::ReportShardsRequest taken;
  taken.set_checkpoint_id(id);
  taken.set_rank(1);
  taken.add_files()->set_name("w_0_0");
  taken.mutable_files(0)->set_xxh3(good);
  EXPECT_THAT(Message(set_.Report(taken)), HasSubstr("which rank 0 has reported before"));
}

TEST_F(CheckpointSetTest, BeginThatIsWrong_IsRefused) {
  Begin("", 1);
  EXPECT_THAT(Message(error_), HasSubstr("path is empty"));
  Begin("/p", -1);
  EXPECT_THAT(Message(error_), HasSubstr("negative"));
  Begin("/p", 1, 0);
  EXPECT_THAT(Message(error_), HasSubstr("ranks is 0"));
  Begin(std::string(5000, 'x'), 1);
  EXPECT_THAT(Message(error_), HasSubstr("at most 4096"));
  for (size_t i = 0; i < CheckpointSet::kMaxPreparing; ++i) {
    Begin(absl::StrCat("/p/", i), 1);
    EXPECT_EQ(error_, std::nullopt);
  }
  Begin("/p/more", 1);
  EXPECT_THAT(Message(error_), HasSubstr("finish or abort one"));
  EXPECT_THAT(changes_, SizeIs(CheckpointSet::kMaxPreparing));
}

TEST_F(CheckpointSetTest, MoreThanItKeepsRecordsOf_ForgetsTheOldestThatNoResumeWouldTake) {
  const uint64_t held_back = Save("/c/held_back", 1, 0, /*hold_back=*/true);
  const uint64_t other = Save("/other/1", 1);
  const uint64_t pinned = Save("/c/pinned", 1);
  EXPECT_EQ(Mark(pinned, v1::MarkCheckpointRequest::PIN), "");
  const uint64_t first = Save("/c/first", 1), second = Save("/c/second", 1);
  v1::CheckpointChanged restored;
  // Restores records as if they had been saved, without the time that saves take.
  v1::CheckpointRecord& record = *restored.mutable_record();
  record = sealed_.checkpoint();
  record.set_state(v1::CHECKPOINT_STATE_PUBLISHED);
  record.set_published(true);
  while (set_.size() < CheckpointSet::kMaxRecords) {
    record.set_checkpoint_id(next_id_++);
    record.set_path(absl::StrCat("/c/", record.checkpoint_id()));
    record.set_pinned(true);
    set_.Restore(restored);
  }
  changes_.clear();
  const uint64_t third = Save("/c/third", 3);
  uint64_t last = third;
  EXPECT_EQ(set_.size(), CheckpointSet::kMaxRecords);
  EXPECT_EQ(changes_.front().removed(), first) << "it is journaled";
  EXPECT_THAT(to_delete_, IsEmpty()) << "its folder stays";
  EXPECT_EQ(Resolve(), last);
  const auto forgotten = [&] {
    changes_.clear();
    last = Save(absl::StrCat("/c/", next_id_), 4);
    EXPECT_EQ(Resolve(), last);
    EXPECT_EQ(set_.size(), CheckpointSet::kMaxRecords);
    return changes_.front().removed();
  };
  EXPECT_EQ(forgotten(), second);
  EXPECT_EQ(forgotten(), third) << "those that are not pinned";
  EXPECT_THAT(Ids(), AllOf(Contains(held_back), Contains(other), Contains(pinned)));
  // A program that names its checkpoints has all of them pinned.
  EXPECT_EQ(Mark(last, v1::MarkCheckpointRequest::PIN), "");
  EXPECT_EQ(forgotten(), third + 1);
  EXPECT_EQ(Mark(last, v1::MarkCheckpointRequest::PIN), "");
  EXPECT_EQ(forgotten(), held_back);
  EXPECT_EQ(Mark(last, v1::MarkCheckpointRequest::PIN), "");
  EXPECT_EQ(forgotten(), pinned);
  EXPECT_THAT(Ids(), Contains(other)) << "a resume of its folder takes it";
}

TEST_F(CheckpointSetTest, Retention_LetsTheOldestGoOnlyAfterTheNewIsPublished) {
  const uint64_t a = Save("/c/1", 1), b = Save("/c/2", 2);
  const uint64_t c = Begin("/c/3", 3, 1, /*keep=*/2);
  Report(c, 0, 1);
  EXPECT_EQ(Seal(c), "");
  EXPECT_THAT(Ids(), ElementsAre(a, b, c));
  EXPECT_THAT(Publish(c), ElementsAre(a));
  EXPECT_EQ(Resolve(), c);
  EXPECT_THAT(Publish(c), ElementsAre(a)) << "asked for again until it is deleted";
  EXPECT_EQ(Deleted({a}), "");
  EXPECT_EQ(Deleted({a}), "") << "a repeat";
  EXPECT_THAT(Deleted({b}), HasSubstr("it is not marked for deletion"));
  EXPECT_THAT(Ids(), ElementsAre(b, c));
}

TEST_F(CheckpointSetTest, Retention_SparesPinnedEveryNthAndTheOneThatAResumeTakes) {
  const uint64_t pinned = Save("/c/1", 1);
  EXPECT_EQ(Mark(pinned, v1::MarkCheckpointRequest::PIN), "");
  const uint64_t tenth = Save("/c/10", 10);
  const uint64_t resumed = Save("/c/11", 11);
  const uint64_t held_1 = Save("/c/12", 12, 1, /*hold_back=*/true, 10);
  EXPECT_THAT(to_delete_, IsEmpty()) << "11 is the newest that a resume may take";
  const uint64_t held_2 = Save("/c/13", 13, 1, /*hold_back=*/true, 10);
  EXPECT_THAT(to_delete_, ElementsAre(held_1));
  EXPECT_EQ(Resolve(), resumed);
  EXPECT_EQ(Resolve(/*any=*/true), held_2);
  EXPECT_EQ(Mark(held_2, v1::MarkCheckpointRequest::PROMOTE), "");
  EXPECT_EQ(Resolve(), held_2);
  EXPECT_THAT(Mark(held_1, v1::MarkCheckpointRequest::PIN), HasSubstr("being deleted"));
  EXPECT_THAT(Ids(), ElementsAre(pinned, tenth, resumed, held_1, held_2));
}

// A program without an optimizer stays at step 0.
TEST_F(CheckpointSetTest, Retention_Step0_IsNoMultipleOfKeepEvery) {
  const uint64_t first = Save("/c/0", 0);
  Save("/c/1", 0, /*keep=*/1, /*hold_back=*/false, /*keep_every=*/10);
  EXPECT_THAT(to_delete_, ElementsAre(first));
}

// If the folders of the newer ones are gone, a load gives the old one its name and resumes from it.
TEST_F(CheckpointSetTest, Retention_SparesAnOldOneThatIsPublishedLate) {
  const uint64_t old = Begin("/c/1", 1, 1, /*keep=*/1);
  EXPECT_EQ(Report(old, 0, 1), "");
  EXPECT_EQ(Seal(old), "");
  const uint64_t newer = Save("/c/2", 2, /*keep=*/1);
  EXPECT_THAT(Publish(old), IsEmpty());
  EXPECT_EQ(Mark(old, v1::MarkCheckpointRequest::PIN), "");
  EXPECT_THAT(Ids(), ElementsAre(old, newer));
}

TEST_F(CheckpointSetTest, Damaged_IsNotResolvedAndTakesNoPlaceOfAWholeOne) {
  const uint64_t a = Save("/c/1", 1), b = Save("/c/2", 2);
  EXPECT_EQ(Verify(b, "model.safetensors: block 3 has another digest"), "");
  EXPECT_EQ(verified_.checkpoint().damage(), "model.safetensors: block 3 has another digest");
  EXPECT_EQ(Resolve(), a);
  EXPECT_EQ(Resolve(/*any=*/true), b);
  EXPECT_EQ(changes_.back().record().damage(), verified_.checkpoint().damage()) << "durable";
  // Sizes that fit do not make the bytes whole.
  EXPECT_EQ(Verify(b, "", v1::VERIFY_SIZES), "");
  EXPECT_EQ(Resolve(), a);
  const uint64_t c = Save("/c/3", 3, /*keep=*/2);
  EXPECT_THAT(to_delete_, IsEmpty()) << "of whole ones there are two";
  const uint64_t d = Save("/c/4", 4, /*keep=*/2);
  EXPECT_THAT(to_delete_, ElementsAre(a, b));
  EXPECT_EQ(Verify(d, "x"), "");
  EXPECT_EQ(Verify(c, "x"), "");
  EXPECT_EQ(Resolve(), 0u);
  EXPECT_EQ(Verify(c, ""), "");
  EXPECT_EQ(Resolve(), c);
}

TEST_F(CheckpointSetTest, LastResumableOne_StaysWhenNewerOnesAreDamaged) {
  const uint64_t a = Save("/c/1", 1), b = Save("/c/2", 2);
  EXPECT_EQ(Verify(b, "x"), "");
  const uint64_t held = Save("/c/3", 3, /*keep=*/1, /*hold_back=*/true);
  EXPECT_THAT(to_delete_, ElementsAre(b)) << held;
  EXPECT_EQ(Resolve(), a);
}

TEST_F(CheckpointSetTest, Resolve_Verified_TakesOnlyThoseFoundWhole) {
  const uint64_t a = Save("/c/1", 1), b = Save("/c/2", 2), c = Save("/c/3", 3);
  EXPECT_EQ(Verify(a, ""), "");
  EXPECT_EQ(Verify(b, "", v1::VERIFY_SIZES), "");
  v1::ResolveCheckpointRequest request;
  const auto resolve = [&](v1::VerifyDepth depth) {
    request.set_verified(depth);
    v1::ResolveCheckpointReply reply;
    set_.Resolve(request, &reply);
    return reply.checkpoint().checkpoint_id();
  };
  EXPECT_EQ(resolve(v1::VERIFY_DEPTH_UNSPECIFIED), c);
  EXPECT_EQ(resolve(v1::VERIFY_SIZES), b);
  EXPECT_EQ(resolve(v1::VERIFY_CONTENTS), a);
  EXPECT_EQ(Verify(a, "", v1::VERIFY_SIZES), "");
  EXPECT_EQ(resolve(v1::VERIFY_CONTENTS), a) << "a shallower look takes nothing back";
  EXPECT_EQ(Verify(a, "x"), "");
  const size_t changes = changes_.size();
  EXPECT_EQ(Verify(a, "x"), "");
  EXPECT_EQ(changes_.size(), changes) << "a repeat";
  v1::ResolveCheckpointReply reply;
  EXPECT_THAT(Message(set_.Resolve(request, &reply)), HasSubstr("and promoted and verified"));
}

TEST_F(CheckpointSetTest, Verify_DeepLookThatArrivesAfterANewerShallowOne_Counts) {
  const uint64_t a = Save("/c/1", 1), b = Save("/c/2", 2);
  at_ = 20;
  EXPECT_EQ(Verify(b, "", v1::VERIFY_SIZES), "");
  at_ = 10;
  EXPECT_EQ(Verify(b, "x"), "");
  EXPECT_EQ(Resolve(), a);
  // An older look as deep, or one that finds what a newer one has not missed, does not.
  at_ = 5;
  EXPECT_EQ(Verify(b, ""), "");
  EXPECT_EQ(Resolve(), a);
  at_ = 30;
  EXPECT_EQ(Verify(b, "", v1::VERIFY_CONTENTS), "");
  at_ = 25;
  EXPECT_EQ(Verify(b, "x"), "");
  EXPECT_EQ(Resolve(), b);
}

TEST_F(CheckpointSetTest, Verify_DamageFoundAgain_IsAsNewAsTheLastLook) {
  const uint64_t a = Save("/c/1", 1), b = Save("/c/2", 2);
  at_ = 10;
  EXPECT_EQ(Verify(b, "x"), "");
  at_ = 30;
  EXPECT_EQ(Verify(b, "x"), "");
  at_ = 20;
  EXPECT_EQ(Verify(b, ""), "");
  EXPECT_EQ(Resolve(), a);
}

TEST_F(CheckpointSetTest, Verify_ShallowDamageAndItsRepair_KeepWhatADeepLookFound) {
  const uint64_t a = Save("/c/1", 1), b = Save("/c/2", 2);
  EXPECT_EQ(Verify(b, "block 3 has another digest"), "");
  EXPECT_EQ(Verify(b, "a file is missing", v1::VERIFY_SIZES), "");
  EXPECT_EQ(verified_.checkpoint().damage(), "a file is missing");
  EXPECT_EQ(Verify(b, "", v1::VERIFY_SIZES), "");
  EXPECT_EQ(Resolve(), a) << "nobody has read its bytes since";
  EXPECT_EQ(Verify(b, ""), "");
  EXPECT_EQ(Resolve(), b);
}

TEST_F(CheckpointSetTest, Verify_DeepDamageThatArrivesAfterNewerShallowDamage_OutlivesItsRepair) {
  const uint64_t a = Save("/c/1", 1), b = Save("/c/2", 2);
  at_ = 20;
  EXPECT_EQ(Verify(b, "a file is missing", v1::VERIFY_SIZES), "");
  at_ = 10;
  EXPECT_EQ(Verify(b, "block 3 has another digest"), "");
  EXPECT_EQ(verified_.checkpoint().damage(), "a file is missing") << "the newer one";
  at_ = 30;
  EXPECT_EQ(Verify(b, "", v1::VERIFY_SIZES), "");
  EXPECT_EQ(Resolve(), a);
  EXPECT_EQ(Verify(b, ""), "");
  EXPECT_EQ(Resolve(), b);
}

TEST_F(CheckpointSetTest, Verify_OfAnotherRecordOrWithoutFacts_IsRefused) {
  const uint64_t a = Save("/c/1", 1);
  const size_t changes = changes_.size();
  EXPECT_THAT(Verify(a, "", v1::VERIFY_CONTENTS, "other"), HasSubstr("other than the one"));
  EXPECT_THAT(Verify(a, "", v1::VERIFY_DEPTH_UNSPECIFIED), HasSubstr("VERIFY_CONTENTS"));
  EXPECT_THAT(Verify(a, std::string(2000, 'x')), HasSubstr("at most 1024"));
  EXPECT_THAT(Verify(a + 7, ""), HasSubstr("has no checkpoint"));
  v1::VerifyCheckpointRequest request;
  request.set_checkpoint_id(a);
  request.set_depth(v1::VERIFY_SIZES);
  EXPECT_THAT(Message(set_.Verify(request, &verified_, &changes_)), HasSubstr("verified_unix_us"));
  const uint64_t open = Begin("/c/2", 2, 1);
  EXPECT_THAT(Verify(open, ""), HasSubstr("only a sealed or published one can be verified"));
  EXPECT_EQ(changes_.size(), changes + 1) << "of Begin";
  // The record itself was changed on the coordinator's disk.
  v1::CheckpointChanged change = changes_[changes - 1];
  change.mutable_record()->set_step(7);
  set_.Restore(change);
  EXPECT_THAT(Verify(a, ""), HasSubstr("is not as it was sealed"));
}

TEST_F(CheckpointSetTest, Retention_LeavesOtherFoldersAlone) {
  const uint64_t a1 = Save("/a/1", 1), a2 = Save("/a/2", 2);
  const uint64_t b1 = Save("/b/1", 1, /*keep=*/1);
  EXPECT_THAT(to_delete_, IsEmpty());
  const uint64_t b2 = Save("/b/2", 2, /*keep=*/1);
  EXPECT_THAT(to_delete_, ElementsAre(b1));
  v1::CollectCheckpointsRequest request;
  request.set_keep(1);
  request.set_dry_run(true);
  v1::CollectCheckpointsReply reply;
  EXPECT_EQ(Message(set_.Collect(request, &reply, &changes_)), "");
  ASSERT_EQ(reply.to_delete_size(), 2) << "one of each folder";
  EXPECT_EQ(reply.to_delete(0).checkpoint_id(), a1);
  EXPECT_THAT(Ids(), ElementsAre(a1, a2, b1, b2));
}

TEST_F(CheckpointSetTest, Collect_DryRunChangesNothing) {
  const uint64_t a = Save("/c/1", 1), b = Save("/c/2", 2);
  v1::CollectCheckpointsRequest request;
  v1::CollectCheckpointsReply reply;
  EXPECT_THAT(Message(set_.Collect(request, &reply, &changes_)), HasSubstr("keep is 0"));
  request.set_keep(1);
  request.set_dry_run(true);
  const size_t changes = changes_.size();
  EXPECT_EQ(Message(set_.Collect(request, &reply, &changes_)), "");
  ASSERT_EQ(reply.to_delete_size(), 1);
  EXPECT_EQ(reply.to_delete(0).checkpoint_id(), a);
  EXPECT_EQ(changes_.size(), changes);
  request.set_dry_run(false);
  reply.Clear();
  set_.Collect(request, &reply, &changes_);
  EXPECT_EQ(reply.to_delete(0).state(), v1::CHECKPOINT_STATE_DELETING);
  EXPECT_EQ(Resolve(), b);
}

TEST_F(CheckpointSetTest, SamePathAgain_TakesTheOldOnesPlace) {
  const uint64_t old = Save("/c/last", 1);
  const uint64_t now = Save("/c/last", 2);
  EXPECT_NE(old, now);
  EXPECT_THAT(Ids(), ElementsAre(now));
}

TEST_F(CheckpointSetTest, SamePathAgain_TheOldOneIsNoneOfThoseThatRetentionKeeps) {
  const uint64_t a = Save("/c/1", 1);
  Save("/c/2", 2);
  const uint64_t now = Save("/c/2", 3, /*keep=*/2);
  EXPECT_THAT(to_delete_, IsEmpty());
  EXPECT_THAT(Ids(), ElementsAre(a, now));
  // It is not what a resume would take either.
  Save("/c/2", 4, /*keep=*/1, /*hold_back=*/true);
  EXPECT_THAT(to_delete_, IsEmpty());
  EXPECT_EQ(Resolve(), a);
}

TEST_F(CheckpointSetTest, GenerationEnds_WhatItPreparedIsGoneAndWhatItSealedStays) {
  const uint64_t sealed = Begin("/c/1", 1, 1);
  Report(sealed, 0, 1);
  Seal(sealed);
  const uint64_t half = Begin("/c/2", 2);
  generation_ = 2;
  set_.DropPreparing(&changes_);
  EXPECT_THAT(Report(half, 0), HasSubstr("begin a new one"));
  EXPECT_EQ(Resolve(), 0u);
  EXPECT_EQ(error_, std::nullopt);
  EXPECT_EQ(resolved_.unpublished(0).staging(), "/c/1.tmp-1");
  // No caller asked for it: the next one that is published lets it go.
  const uint64_t next = Save("/c/3", 3);
  EXPECT_THAT(to_delete_, ElementsAre(sealed));
  EXPECT_EQ(Resolve(), next);
}

TEST_F(CheckpointSetTest, Abort_OnlyOfWhatIsBeingPrepared) {
  const uint64_t a = Begin("/c/1", 1, 1);
  EXPECT_EQ(Message(set_.Abort(a, &changes_)), "");
  EXPECT_EQ(Message(set_.Abort(a, &changes_)), "");
  EXPECT_THAT(Ids(), IsEmpty());
  const uint64_t b = Save("/c/2", 2);
  EXPECT_THAT(Message(set_.Abort(b, &changes_)), HasSubstr("is published"));
}

class SignedCheckpointSetTest : public CheckpointSetTest {
 protected:
  SignedCheckpointSetTest()
      : CheckpointSetTest([](absl::string_view sha256) {
          return absl::StrCat("signature of ", absl::BytesToHexString(sha256));
        }) {}
};

TEST_F(SignedCheckpointSetTest, Seal_SignsTheHashOfTheRecord) {
  Save("/c/1", 1);
  const v1::CheckpointRecord signed_one = sealed_.checkpoint();
  EXPECT_EQ(signed_one.signature(),
            absl::StrCat("signature of ", absl::BytesToHexString(signed_one.sha256())));
  // The signature is over the hash that an unsigned record has.
  EXPECT_EQ(RecordSha256("job", signed_one), signed_one.sha256());
  v1::ListCheckpointsReply list;
  set_.List({}, &list);
  ASSERT_EQ(list.checkpoints_size(), 1);
  EXPECT_EQ(list.checkpoints(0).signature(), signed_one.signature());
}

// Digests have the name of the job that sealed them: the next attempts must still find them right.
TEST_F(CheckpointSetTest, Adopt_ByAnotherAttempt_KeepsTheNameThatTheDigestsHave) {
  Save("/c/1", 1);
  CheckpointSet again("job", nullptr, {}), second("job.2", nullptr, {}),
      third("job.3", nullptr, {});
  const auto list = [](const CheckpointSet& set) {
    v1::ListCheckpointsReply reply;
    set.List({}, &reply);
    return reply;
  };
  again.Adopt(&set_);
  EXPECT_EQ(list(again).checkpoints(0).job_id(), "");
  second.Adopt(&again);
  third.Adopt(&second);
  ASSERT_EQ(list(third).checkpoints_size(), 1);
  const v1::CheckpointRecord adopted = list(third).checkpoints(0);
  EXPECT_EQ(adopted.job_id(), "job");
  EXPECT_EQ(RecordSha256(adopted.job_id(), adopted), adopted.sha256());
}

TEST_F(CheckpointSetTest, Chain_ShowsEveryChangeAndOmission) {
  Save("/c/1", 1);
  const v1::CheckpointRecord first = sealed_.checkpoint();
  Save("/c/2", 2);
  const v1::CheckpointRecord second = sealed_.checkpoint();
  EXPECT_EQ(first.previous_sha256(), "");
  EXPECT_EQ(second.previous_sha256(), first.sha256());
  EXPECT_EQ(set_.head_sha256(), second.sha256());
  EXPECT_EQ(RecordSha256("job", second), second.sha256());
  v1::CheckpointRecord forged = second;
  forged.set_step(3);
  EXPECT_NE(RecordSha256("job", forged), second.sha256());
  EXPECT_NE(RecordSha256("other", second), second.sha256());
  // The format is a promise: docs/checkpoint_format.md.
  EXPECT_EQ(absl::BytesToHexString(Sha256("abc")),
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad");
  v1::ShardFile file;
  file.set_name("w_0_0");
  file.set_bytes(100);
  file.set_xxh3(std::string(32, 'a'));
  EXPECT_EQ(FilesSha256({file}), Sha256("w_0_0\t100\t" + std::string(32, 'a') + "\n"));
  EXPECT_EQ(first.files_sha256(), FilesSha256({file}));
}

TEST_F(CheckpointSetTest, Replay_GivesTheSameSetAndAsksForTheReportsAgain) {
  Save("/c/1", 1);
  Save("/c/2", 2);
  const uint64_t open = Begin("/c/3", 3);
  Report(open, 0);
  Report(open, 1);
  CheckpointSet replayed("job"), from_snapshot("job");
  for (const v1::CheckpointChanged& change : changes_) replayed.Restore(change);
  set_.ForEach([&](const v1::CheckpointChanged& change) { from_snapshot.Restore(change); });
  for (CheckpointSet* const set : {&replayed, &from_snapshot}) {
    v1::ListCheckpointsReply before, after;
    set_.List({}, &before);
    set->List({}, &after);
    EXPECT_EQ(after.SerializeAsString(), before.SerializeAsString());
    EXPECT_EQ(set->head_sha256(), set_.head_sha256());
    v1::SealCheckpointRequest request;
    request.set_checkpoint_id(open);
    EXPECT_THAT(Message(set->Seal(request, &sealed_, &changes_)),
                HasSubstr("2 of 2 ranks have not reported"));
  }
}

TEST_F(CheckpointSetTest, ReportsThatAreTooLarge_AreRefused) {
  const uint64_t id = Begin("/c/1", 1);
  v1::ReportShardsRequest request;
  request.set_checkpoint_id(id);
  std::string message;
  for (int part = 0; message.empty() && part < 4000; ++part) {
    request.set_part(part);
    request.clear_files();
    for (int i = 0; i < 500; ++i) {
      v1::ShardFile* const file = request.add_files();
      file->set_name(absl::StrCat(std::string(200, 'n'), part, "_", i));
      file->set_xxh3(std::string(32, 'a'));
    }
    message = Message(set_.Report(request));
  }
  EXPECT_THAT(message, HasSubstr("48 MiB"));
  EXPECT_LE(set_.report_bytes(), CheckpointSet::kMaxReportBytes + 1024);
}

TEST_F(CheckpointSetTest, ReportsOfAllJobs_AreBounded) {
  ReportBudget budget{.of_all = 4096};
  {
    CheckpointSet other("other", &budget, {});
    v1::BeginCheckpointRequest begin;
    begin.set_path("/c");
    begin.set_staging("/c.tmp");
    begin.set_ranks(1);
    v1::BeginCheckpointReply reply;
    EXPECT_EQ(Message(other.Begin(begin, 1, 1, &reply, &changes_)), "");
    v1::ReportShardsRequest request;
    request.set_checkpoint_id(1);
    CheckpointSet::Error error;
    for (int part = 0; !error.has_value() && part < 1000; ++part) {
      request.set_part(part);
      request.clear_files();
      request.add_files()->set_name(absl::StrCat("f", part));
      request.mutable_files(0)->set_xxh3(std::string(32, 'a'));
      error = other.Report(request);
    }
    ASSERT_TRUE(error.has_value());
    EXPECT_EQ(error->detail().reason(), v1::ERROR_REASON_OVERLOADED);
    EXPECT_GT(budget.used, 3000u);
    EXPECT_LE(budget.used, 4096u);
  }
  EXPECT_EQ(budget.used, 0u);
}

TEST_F(CheckpointSetTest, PartThatIsTooLarge_IsRefused) {
  const uint64_t id = Begin("/c/1", 1, 1);
  v1::ReportShardsRequest request;
  request.set_checkpoint_id(id);
  request.add_files()->set_name("f");
  request.mutable_files(0)->set_xxh3(std::string(32, 'a'));
  for (int i = 0; i < 400'000; ++i) {
    request.mutable_files(0)->add_slices()->set_tensor("x");
  }
  EXPECT_THAT(Message(set_.Report(request)), HasSubstr("at most 1 MiB"));
}

TEST_F(CheckpointSetTest, OneNameForSeveral_NeverLetsTheLiveOneGo) {
  // This one was sealed by a generation that ended before it was published.
  const uint64_t orphan = Begin("/c/1", 1, 1);
  Report(orphan, 0, 1);
  Seal(orphan);
  generation_ = 2;
  set_.DropPreparing(&changes_);
  const uint64_t live = Begin("/c/1", 1, 1);
  Report(live, 0, 1);
  Seal(live);
  v1::PublishCheckpointRequest request;
  request.set_checkpoint_id(live);
  v1::PublishCheckpointReply reply;
  EXPECT_EQ(Message(set_.Publish(request, &reply, &changes_)), "");
  ASSERT_EQ(reply.to_delete_size(), 1);
  EXPECT_FALSE(reply.to_delete(0).published()) << "only its staging folder goes";
  // The old one cannot take the name now either.
  const uint64_t late = Begin("/c/2", 2, 1);
  Report(late, 0, 1);
  Seal(late);
  const uint64_t newer = Save("/c/2", 3);
  Publish(late);
  EXPECT_THAT(Message(error_), HasSubstr("is newer and has its name"));
  EXPECT_EQ(Resolve(), newer);
}

TEST_F(CheckpointSetTest, NameThatIsBeingDeleted_IsNotGivenAgain) {
  const uint64_t old = Save("/c/1", 1);
  Save("/c/2", 2, /*keep=*/1);
  EXPECT_THAT(to_delete_, ElementsAre(old));
  Begin("/c/1", 3);
  EXPECT_THAT(Message(error_), HasSubstr("is being deleted"));
  EXPECT_EQ(Deleted({old}), "");
  Begin("/c/1", 3);
  EXPECT_EQ(error_, std::nullopt);
}

TEST_F(CheckpointSetTest, CollectAgain_NamesWhatIsNotDeletedYet) {
  const uint64_t a = Save("/c/1", 1);
  Save("/c/2", 2);
  v1::CollectCheckpointsRequest request;
  request.set_keep(1);
  for (int i = 0; i < 2; ++i) {
    v1::CollectCheckpointsReply reply;
    EXPECT_EQ(Message(set_.Collect(request, &reply, &changes_)), "");
    ASSERT_EQ(reply.to_delete_size(), 1) << "the first answer was lost";
    EXPECT_EQ(reply.to_delete(0).checkpoint_id(), a);
  }
}

TEST_F(CheckpointSetTest, PinnedOnes_DoNotCountForKeep) {
  const uint64_t a = Save("/c/1", 1), b = Save("/c/2", 2);
  EXPECT_EQ(Mark(b, v1::MarkCheckpointRequest::PIN), "");
  Save("/c/3", 3, /*keep=*/2);
  EXPECT_THAT(to_delete_, IsEmpty()) << "3 and 1, besides 2";
  Save("/c/4", 4, /*keep=*/2);
  EXPECT_THAT(to_delete_, ElementsAre(a));
}

}  // namespace
}  // namespace muster::coordinator
