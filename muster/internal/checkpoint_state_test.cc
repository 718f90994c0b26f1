#include "muster/internal/checkpoint_state.h"

#include <cstdio>
#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "muster/internal/test_parts.h"
#include "worker/checkpoint/folder.h"

namespace muster::internal {
namespace {

using testing::HasSubstr;

class CheckpointStateTest : public testing::Test {
 protected:
  std::string Dir(const std::string& name) const { return TestPath(name); }
  void RegisterNumber() {
    checkpoints_.objects().Register(
        [this] {
          return PlainState{{"number", {number_}}};
        },
        [this](const PlainState& state) { number_ = state.at("number").at(0); });
  }

  double number_ = 0;
  Parts parts_;
  CheckpointState checkpoints_{parts_.process, parts_.registry, parts_.loops, parts_.steps,
                               [] { return false; }};
};

TEST_F(CheckpointStateTest, RegisteredObject_ComesBack) {
  RegisterNumber();
  number_ = 7;
  ASSERT_TRUE(checkpoints_.Save(Dir("object")).ok());
  EXPECT_EQ(checkpoints_.last_checkpoint(), Dir("object"));
  EXPECT_EQ(checkpoints_.save_iteration(), 1);
  number_ = 0;
  ASSERT_TRUE(checkpoints_.Load(Dir("object"), /*may_be_missing=*/false).ok());
  EXPECT_EQ(number_, 7);
}

TEST_F(CheckpointStateTest, OtherObjectsThanSaved_AreRefused) {
  ASSERT_TRUE(checkpoints_.Save(Dir("other")).ok());
  RegisterNumber();
  const absl::Status loaded = checkpoints_.Load(Dir("other"), false);
  EXPECT_EQ(loaded.code(), absl::StatusCode::kFailedPrecondition) << loaded;
}

TEST_F(CheckpointStateTest, Hook_RunsUntilItIsRemoved) {
  int calls = 0;
  const int64_t hook = checkpoints_.objects().AddSaveHook(
      [&](std::vector<NamedTensors>&, StateWriter&) { ++calls; });
  ASSERT_TRUE(checkpoints_.Save(Dir("hook1")).ok());
  checkpoints_.objects().Remove(hook);
  ASSERT_TRUE(checkpoints_.Save(Dir("hook2")).ok());
  EXPECT_EQ(calls, 1);
}

TEST_F(CheckpointStateTest, HookThatRemovesItselfAndAnother_RunsOnceAndTheOtherDoesNot) {
  int calls = 0, others = 0;
  int64_t own = 0, other = 0;
  // The function captures it, so that it uses memory of its own after it was removed while running.
  const std::string name = "a name that is too long to be kept in the function itself";
  own = checkpoints_.objects().AddSaveHook([&, name](std::vector<NamedTensors>&, StateWriter&) {
    checkpoints_.objects().Remove(own);
    checkpoints_.objects().Remove(other);
    calls += name.empty() ? 0 : 1;
  });
  other = checkpoints_.objects().AddSaveHook(
      [&](std::vector<NamedTensors>&, StateWriter&) { ++others; });
  for (const char* const dir : {"once1", "once2"}) ASSERT_TRUE(checkpoints_.Save(Dir(dir)).ok());
  EXPECT_EQ(calls, 1);
  own =
      checkpoints_.objects().AddLoadHook([&, name](std::vector<NamedTensors>&, const StateReader&) {
        checkpoints_.objects().Remove(own);
        checkpoints_.objects().Remove(other);
        calls += name.empty() ? 0 : 1;
      });
  other = checkpoints_.objects().AddLoadHook(
      [&](std::vector<NamedTensors>&, const StateReader&) { ++others; });
  for (int i = 0; i < 2; ++i) ASSERT_TRUE(checkpoints_.Load(Dir("once1"), false).ok());
  EXPECT_EQ(calls, 2);
  EXPECT_EQ(others, 0);
}

TEST_F(CheckpointStateTest, ObjectThatRemovesItselfInItsSaveOrLoad_LeavesTheOthersTheirState) {
  const std::string name = "a name that is too long to be kept in the function itself";
  for (const bool in_save : {true, false}) {
    const std::string dir = Dir(in_save ? "in_save" : "in_load");
    for (const bool save : {true, false}) {
      Parts parts;
      CheckpointState checkpoints(parts.process, parts.registry, parts.loops, parts.steps,
                                  [] { return false; });
      double own = save ? 1 : 0, second = save ? 2 : 0, third = save ? 3 : 0;
      int64_t number = 0;
      number = checkpoints.objects().Register(
          [&, name] {
            if (in_save) checkpoints.objects().Remove(number);
            return PlainState{{"own", {name.empty() ? 0 : own}}};
          },
          [&, name](const PlainState& state) {
            if (!in_save) checkpoints.objects().Remove(number);
            own = name.empty() ? 0 : state.at("own").at(0);
          });
      for (double* const value : {&second, &third}) {
        const std::string key = value == &second ? "second" : "third";
        checkpoints.objects().Register(
            [value, key] {
              return PlainState{{key, {*value}}};
            },
            [value, key](const PlainState& state) { *value = state.at(key).at(0); });
      }
      const absl::Status status =
          save ? checkpoints.Save(dir) : checkpoints.Load(dir, /*may_be_missing=*/false);
      ASSERT_TRUE(status.ok()) << status << " " << in_save << " " << save;
      EXPECT_EQ(own, 1);
      EXPECT_EQ(second, 2);
      EXPECT_EQ(third, 3);
    }
  }
}

TEST_F(CheckpointStateTest, ObjectThatAnotherOneRemovesInASaveOrLoad_RunsNoMore) {
  RegisterNumber();
  const int64_t first = checkpoints_.objects().next_number();
  int calls = 0;
  bool remove = false;
  int64_t other = 0;
  const auto maybe_remove = [&] {
    if (remove) checkpoints_.objects().Remove(other);
  };
  checkpoints_.objects().Register(
      [&] {
        maybe_remove();
        return PlainState{{"nothing", {0}}};
      },
      [&](const PlainState&) { maybe_remove(); });
  const auto add_other = [&] {
    other = checkpoints_.objects().Register(
        [&] {
          ++calls;
          return PlainState{{"nothing", {0}}};
        },
        [&](const PlainState&) { ++calls; });
  };
  add_other();
  ASSERT_TRUE(checkpoints_.Save(Dir("three")).ok());
  EXPECT_EQ(calls, 1);
  remove = true;
  EXPECT_THAT(checkpoints_.Save(Dir("refused")).message(), HasSubstr("has removed object 2"));
  add_other();
  EXPECT_TRUE(checkpoints_.Load(Dir("three"), false).ok());
  EXPECT_EQ(calls, 1);
  checkpoints_.objects().RemoveSince(first);
}

// It may own a handle of its own, for example.
TEST_F(CheckpointStateTest, ObjectWhoseFunctionsOwnWhatRemovesIt_IsRemovedOnce) {
  struct Owner {
    ~Owner() {
      checkpoints.objects().Remove(number);
      ++removed;
    }
    CheckpointState& checkpoints;
    int& removed;
    int64_t number = 0;
  };
  int removed = 0;
  auto owner = std::shared_ptr<Owner>(new Owner{checkpoints_, removed});
  const int64_t number = owner->number = checkpoints_.objects().Register(
      [owner] {
        return PlainState{{"number", {1}}};
      },
      [owner](const PlainState&) {});
  owner.reset();
  EXPECT_EQ(removed, 0);
  checkpoints_.objects().Remove(number);
  EXPECT_EQ(removed, 1);
  RegisterNumber();
  EXPECT_TRUE(checkpoints_.Save(Dir("owner")).ok());
}

TEST_F(CheckpointStateTest, HookThatRegistersOrRemovesAnObject_IsAnError) {
  RegisterNumber();
  ASSERT_TRUE(checkpoints_.Save(Dir("registered")).ok());
  int64_t hook = checkpoints_.objects().AddSaveHook(
      [&](std::vector<NamedTensors>&, StateWriter&) { RegisterNumber(); });
  const int64_t first = checkpoints_.objects().next_number();
  EXPECT_THAT(checkpoints_.Save(Dir("refused")).message(), HasSubstr("registered or removed"));
  checkpoints_.objects().RemoveSince(first);
  checkpoints_.objects().Remove(hook);
  checkpoints_.objects().AddLoadHook([&](std::vector<NamedTensors>&, const StateReader&) {
    checkpoints_.objects().RemoveSince(0);
  });
  number_ = 8;
  EXPECT_THAT(checkpoints_.Load(Dir("registered"), false).message(),
              HasSubstr("registered or removed"));
  EXPECT_EQ(number_, 8) << "nothing has changed";
}

// Also if it is the first object.
TEST_F(CheckpointStateTest, LoadHookThatRegistersTheFirstObject_IsAnError) {
  ASSERT_TRUE(checkpoints_.Save(Dir("none registered")).ok());
  checkpoints_.objects().AddLoadHook([&](std::vector<NamedTensors>&, const StateReader&) {
    for (int i = 0; i < 1000; ++i) RegisterNumber();
  });
  EXPECT_THAT(checkpoints_.Load(Dir("none registered"), false).message(),
              HasSubstr("registered or removed"));
}

// Its path is that of an existing folder.
TEST_F(CheckpointStateTest, LastCheckpoint_OfOneThatLackedItsName_IsWhereItIsNow) {
  const std::string named = Dir("unnamed"), staging = named + ".tmp-0123456789abcdef";
  ASSERT_TRUE(checkpoints_.Save(named).ok());
  ASSERT_EQ(rename(named.c_str(), staging.c_str()), 0);
  ASSERT_TRUE(checkpoints_.Load(staging, false).ok());
  EXPECT_EQ(checkpoints_.last_checkpoint(), staging);
  // Another program's folder.
  ASSERT_EQ(rename(staging.c_str(), Dir("aside").c_str()), 0);
  ASSERT_TRUE(MakeDirectories(named).ok());
  Manifest other = *ReadManifest(Dir("aside"));
  other.created = "1999-01-01T00:00:00+00:00";
  ASSERT_TRUE(WriteFileAtomically(JoinPath(named, kManifestName), *EncodeManifest(other)).ok());
  EXPECT_EQ(checkpoints_.last_checkpoint(), staging);
  // Now it has its final name.
  ASSERT_TRUE(RemoveTree(named).ok());
  ASSERT_EQ(rename(Dir("aside").c_str(), named.c_str()), 0);
  EXPECT_EQ(checkpoints_.last_checkpoint(), named);
  ASSERT_TRUE(checkpoints_.Save(Dir("next")).ok());
  EXPECT_EQ(checkpoints_.last_checkpoint(), Dir("next"));
}

// The agent's state cannot be discarded, and a later load would take it for the newest.
TEST_F(CheckpointStateTest, AgentThatDoesNotAnswer_FailsLoadsAlsoFromTheDiskButNoSave) {
  AcceleratorOptions options;
  options.checkpoint.memory = true;
  JoinedProcess joined = Parts::Alone(options);
  joined.environment.memory_socket.value = "no agent listens here";
  joined.environment.worker_id.value = "w0";
  Process process(options, std::move(joined));
  Registry registry([] {});
  LoopTracker loops(registry, [] {});
  StepController steps(process, registry, loops);
  CheckpointState checkpoints(process, registry, loops, steps, [] { return false; });
  double number = 7;
  checkpoints.objects().Register(
      [&] {
        return PlainState{{"number", {number}}};
      },
      [&](const PlainState& state) { number = state.at("number").at(0); });
  const absl::Status saved = checkpoints.Save(Dir("on disk"));
  ASSERT_TRUE(saved.ok()) << saved;
  number = 8;
  for (int i = 0; i < 2; ++i) {
    const absl::Status loaded = checkpoints.Load(Dir("on disk"), false);
    EXPECT_EQ(loaded.code(), absl::StatusCode::kUnavailable) << loaded;
  }
  EXPECT_EQ(number, 8) << "nothing has changed";
}

// Not "no checkpoint yet", after which training begins from scratch.
TEST_F(CheckpointStateTest, StateOfAccelerate_IsNamedAndNotMissing) {
  const auto put = [](const std::string& dir) {
    ASSERT_TRUE(MakeDirectories(dir).ok());
    for (const char* const name : {"model.safetensors", "optimizer.bin", "random_states_0.pkl"}) {
      ASSERT_TRUE(WriteFileAtomically(JoinPath(dir, name), "x").ok());
    }
  };
  const auto expect_named = [&](CheckpointState& checkpoints, const std::string& given,
                                const std::string& dir) {
    for (const bool may_be_missing : {false, true}) {
      const absl::Status loaded = checkpoints.Load(given, may_be_missing);
      EXPECT_EQ(loaded.code(), absl::StatusCode::kFailedPrecondition) << loaded;
      EXPECT_THAT(std::string(loaded.message()), HasSubstr(dir + " is a state of Accelerate's"));
      EXPECT_THAT(std::string(loaded.message()), HasSubstr("load_weights(\"" + dir + "\")"));
    }
  };
  put(Dir("accelerate"));
  expect_named(checkpoints_, Dir("accelerate"), Dir("accelerate"));

  AcceleratorOptions options;
  JoinedProcess joined = Parts::Alone(options);
  joined.environment.project_dir.value = Dir("project");
  Process process(options, std::move(joined));
  Registry registry([] {});
  LoopTracker loops(registry, [] {});
  StepController steps(process, registry, loops);
  CheckpointState checkpoints(process, registry, loops, steps, [] { return false; });
  EXPECT_TRUE(checkpoints.Load("", true).ok());
  put(Dir("project/checkpoints/checkpoint_0"));
  put(Dir("project/checkpoints/checkpoint_1"));
  expect_named(checkpoints, "", Dir("project/checkpoints/checkpoint_1"));
  EXPECT_EQ(checkpoints.LoadWeights("", {}).status().code(), absl::StatusCode::kFailedPrecondition);
  // One of ours is loaded, whatever lies beside it.
  ASSERT_TRUE(checkpoints.Save("").ok());
  const absl::Status loaded = checkpoints.Load("", true);
  EXPECT_TRUE(loaded.ok()) << loaded;
}

// A save would refuse the folder.
TEST_F(CheckpointStateTest, FolderWithSomethingElse_IsNoMissingCheckpoint) {
  ASSERT_TRUE(MakeDirectories(Dir("something")).ok());
  EXPECT_TRUE(checkpoints_.Load(Dir("something"), true).ok()) << "it is empty";
  ASSERT_TRUE(checkpoints_.Save(Dir("lost")).ok());
  ASSERT_TRUE(RemoveTree(JoinPath(Dir("lost"), kManifestName)).ok());
  ASSERT_TRUE(WriteFileAtomically(JoinPath(Dir("something"), "model.safetensors"), "x").ok());
  for (const char* const name : {"lost", "something"}) {
    EXPECT_EQ(checkpoints_.Load(Dir(name), false).code(), absl::StatusCode::kNotFound) << name;
    const absl::Status loaded = checkpoints_.Load(Dir(name), true);
    EXPECT_EQ(loaded.code(), absl::StatusCode::kFailedPrecondition) << loaded;
    EXPECT_THAT(std::string(loaded.message()), HasSubstr("it has no manifest.json"));
    EXPECT_EQ(checkpoints_.Save(Dir(name)).code(), absl::StatusCode::kFailedPrecondition);
  }
}

TEST_F(CheckpointStateTest, Tilde_IsHome) {
  ASSERT_TRUE(MakeDirectories(Dir("home")).ok());
  ASSERT_EQ(setenv("HOME", Dir("home").c_str(), 1), 0);
  RegisterNumber();
  number_ = 7;
  ASSERT_TRUE(checkpoints_.Save("~/run").ok());
  EXPECT_EQ(checkpoints_.last_checkpoint(), Dir("home/run"));
  EXPECT_TRUE(PathExists(JoinPath(Dir("home/run"), kManifestName)));
  number_ = 0;
  ASSERT_TRUE(checkpoints_.Load("~/run", false).ok());
  EXPECT_EQ(number_, 7);

  AcceleratorOptions options;
  options.project.logging_directory = "~/logs";
  JoinedProcess joined = Parts::Alone(options);
  joined.environment.project_dir.value = "~/project";
  const Process process(options, std::move(joined));
  EXPECT_EQ(process.ProjectDirectory(), Dir("home/project"));
  EXPECT_EQ(process.LoggingDirectory(), Dir("home/logs"));
}

TEST_F(CheckpointStateTest, MissingCheckpoint_IsAnErrorUnlessItMayBeMissing) {
  EXPECT_EQ(checkpoints_.Load(Dir("none"), false).code(), absl::StatusCode::kNotFound);
  EXPECT_TRUE(checkpoints_.Load(Dir("none"), true).ok());
}

}  // namespace
}  // namespace muster::internal
