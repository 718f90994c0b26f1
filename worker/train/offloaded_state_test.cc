#include "worker/train/offloaded_state.h"

#include <errno.h>

#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/full_like.h"
#include "ATen/ops/zeros.h"
#include "base/test_folder.h"
#include "c10/core/StreamGuard.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/checkpoint/fake_device.h"
#include "worker/collective/fake_streams.h"
#include "worker/collective/test_error.h"
#include "worker/parallel/paged_storage.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Pair;

constexpr uint64_t kWindow = 3 * 4096;

// Seven parameters with two states each, in windows of one or several.
std::vector<at::Tensor> Likes() {
  std::vector<at::Tensor> likes;
  for (const int64_t size : {600, 600, 0, 5000, 3, 1000, 700}) {
    likes.push_back(at::zeros({size}));
  }
  return likes;
}

class OffloadedStateTest : public testing::Test {
 protected:
  std::shared_ptr<ScratchFile> File() {
    absl::StatusOr<std::shared_ptr<ScratchFile>> file =
        ScratchFile::Create(folder_.Path("state"), &system_);
    EXPECT_TRUE(file.ok()) << file.status();
    return *std::move(file);
  }

  static float ValueOf(size_t i, size_t slot, int step) {
    return static_cast<float>(1000 * step + 10 * i + slot);
  }

  // Sets all states to those of `step`, after checking that they are those of the previous step.
  static void Step(OffloadedState& state, int step) {
    const auto all = [](size_t) { return true; };
    size_t seen = 0;
    state.ForWindows(0, Likes().size(), all, [&](size_t first, size_t last) {
      EXPECT_EQ(first, seen);
      seen = last;
      for (size_t i = first; i < last; ++i) {
        for (size_t s = 0; s < 2; ++s) {
          at::Tensor slot = state.Slot(i, s);
          EXPECT_EQ(slot.numel(), Likes()[i].numel());
          if (step > 0) {
            EXPECT_TRUE(slot.eq(ValueOf(i, s, step - 1)).all().item<bool>()) << i;
          }
          slot.fill_(ValueOf(i, s, step));
        }
      }
    });
    EXPECT_EQ(seen, Likes().size());
  }

  TestFolder folder_;
  DirectFileSystem system_;
};

TEST_F(OffloadedStateTest, States_AreThereInTheNextStep) {
  for (const bool on_disk : {true, false}) {
    OffloadedState state(on_disk ? File() : nullptr, kWindow);
    EXPECT_FALSE(state.Has(0));
    state.Add(0, Likes(), 2);
    EXPECT_TRUE(state.Has(6));
    EXPECT_FALSE(state.Has(7));
    for (int step = 0; step < 4; ++step) Step(state, step);
  }
}

TEST_F(OffloadedStateTest, Mapped_IsTheStateOfTheLastStep) {
  for (const bool on_disk : {true, false}) {
    OffloadedState state(on_disk ? File() : nullptr, kWindow);
    state.Add(0, Likes(), 2);
    for (int step = 0; step < 3; ++step) {
      Step(state, step);
      OffloadedState::Maps maps;
      for (size_t i = 0; i < Likes().size(); ++i) {
        for (size_t s = 0; s < 2; ++s) {
          EXPECT_TRUE(
              state.Mapped(i, s, &maps).equal(at::full_like(Likes()[i], ValueOf(i, s, step))))
              << i;
        }
      }
    }
  }
}

struct PageInMemory : Page {
  void Require(bool, const char*) override {}
};

TEST_F(OffloadedStateTest, ParametersOfOnePage_ShareAWindow) {
  PageInMemory page;
  const at::Tensor first = at::zeros({20}), second = at::zeros({20});
  const PageRegistration of_first(first, &page), of_second(second, &page);
  OffloadedState state(File());
  state.Add(0,
            {PagedView(first, {5}, {1}, 0), PagedView(first, {15}, {1}, 5),
             PagedView(second, {20}, {1}, 0), at::zeros({3}), at::zeros({4})},
            1);
  std::vector<std::pair<size_t, size_t>> seen;
  state.ForWindows(
      0, 5, [](size_t) { return true; },
      [&](size_t begin, size_t end) { seen.emplace_back(begin, end); });
  EXPECT_THAT(seen, ElementsAre(Pair(0, 2), Pair(2, 5)));
}

TEST_F(OffloadedStateTest, WindowsOfOnePage_ComeAfterEachOther) {
  PageInMemory page;
  const at::Tensor first = at::zeros({20}), second = at::zeros({20});
  const PageRegistration of_first(first, &page), of_second(second, &page);
  OffloadedState state(File());
  // Two groups with parameters in both pages, and one without pages.
  state.Add(0, {PagedView(first, {5}, {1}, 0), PagedView(second, {5}, {1}, 0)}, 1);
  state.Add(2, {at::zeros({3})}, 1);
  state.Add(3, {PagedView(first, {15}, {1}, 5), PagedView(second, {15}, {1}, 5)}, 1);
  std::vector<size_t> seen;
  state.ForWindows(
      0, 5, [](size_t) { return true; }, [&](size_t begin, size_t) { seen.push_back(begin); });
  EXPECT_THAT(seen, ElementsAre(0, 3, 1, 4, 2));
}

TEST_F(OffloadedStateTest, WindowsThatNobodyWants_AreLeftOut) {
  OffloadedState state(File(), kWindow);
  state.Add(0, Likes(), 2);
  Step(state, 0);
  std::vector<std::pair<size_t, size_t>> seen;
  state.ForWindows(
      0, 7, [](size_t i) { return i == 3 || i == 6; },
      [&](size_t first, size_t last) { seen.emplace_back(first, last); });
  // 600, 600 and 0 are 9,600 bytes; 5,000 is too large for any window and has its own.
  EXPECT_THAT(seen, ElementsAre(Pair(3, 4), Pair(6, 7)));
  OffloadedState::Maps maps;
  EXPECT_EQ(state.Mapped(5, 1, &maps)[999].item<float>(), ValueOf(5, 1, 0));
}

TEST_F(OffloadedStateTest, ParametersAddedLater_HaveWindowsOfTheirOwn) {
  OffloadedState state(File(), kWindow);
  state.Add(0, Likes(), 2);
  Step(state, 0);
  state.Add(7, {at::zeros({4, 4}).t()}, 1);
  state.ForWindows(
      7, 8, [](size_t) { return true; },
      [&](size_t first, size_t last) {
        EXPECT_EQ(last - first, 1u);
        EXPECT_EQ(state.Slot(7, 0).strides(), at::IntArrayRef({1, 4}));
        state.Slot(7, 0).fill_(7);
      });
  Step(state, 1);
  OffloadedState::Maps maps;
  EXPECT_TRUE(state.Mapped(7, 0, &maps).eq(7).all().item<bool>());
}

TEST_F(OffloadedStateTest, DiskThatFails_LosesTheStateAloud) {
  OffloadedState state(File(), kWindow);
  state.Add(0, Likes(), 2);
  Step(state, 0);
  for (const bool reads : {true, false}) {
    int calls = 0;
    const auto fails = [&] {
      errno = EIO;
      return ++calls == 2;
    };
    if (reads) {
      system_.pread = [&](int fd, void* to, size_t size, off_t at) -> ssize_t {
        return fails() ? -1 : ::pread(fd, to, size, at);
      };
    } else {
      system_.pwrite = [&](int fd, const void* from, size_t size, off_t at) -> ssize_t {
        return fails() ? -1 : ::pwrite(fd, from, size, at);
      };
    }
    const auto step = [&] {
      state.ForWindows(
          0, 7, [](size_t) { return true; }, [](size_t, size_t) {});
    };
    EXPECT_THAT(ErrorOf(step), HasSubstr(folder_.Path("state")));
    system_.pread = ::pread;
    system_.pwrite = ::pwrite;
    EXPECT_THAT(ErrorOf(step), HasSubstr("state was lost"));
    state.Renew();
    Step(state, 0);
  }
}

TEST_F(OffloadedStateTest, UpdateThatThrows_EndsTheTransfersAndLosesTheStateAloud) {
  OffloadedState state(File(), kWindow);
  state.Add(0, Likes(), 2);
  const auto all = [](size_t) { return true; };
  EXPECT_THAT(ErrorOf([&] {
                state.ForWindows(
                    0, 7, all, [](size_t first, size_t) { TORCH_CHECK(first == 0, "no kernel"); });
              }),
              HasSubstr("no kernel"));
  EXPECT_THAT(ErrorOf([&] { state.ForWindows(0, 7, all, [](size_t, size_t) {}); }),
              HasSubstr("state was lost"));
}

TEST_F(OffloadedStateTest, FullDisk_IsRefusedWithNothingChanged) {
  OffloadedState state(File(), kWindow);
  system_.allocate = [](int, off_t) {
    errno = ENOSPC;
    return -1;
  };
  EXPECT_THAT(ErrorOf([&] { state.Add(0, Likes(), 2); }), HasSubstr("cannot reserve"));
  EXPECT_FALSE(state.Has(0));
}

// States of parameters on a device, each with its own window.
class OffloadedStateOfADevice : public OffloadedStateTest {
 protected:
  static constexpr size_t kWindows = 5;
  static constexpr int64_t kNumbers = 1024;
  static constexpr int64_t kBytes = 2 * kNumbers * static_cast<int64_t>(sizeof(float));
  using Point = FakeStreams::Point;

  OffloadedStateOfADevice() { LimitFakeDevice(-1); }
  ~OffloadedStateOfADevice() override { LimitFakeDevice(-1); }

  std::unique_ptr<OffloadedState> StateOf(bool on_disk) {
    auto state = std::make_unique<OffloadedState>(on_disk ? File() : nullptr, kBytes);
    state->Add(0, std::vector<at::Tensor>(kWindows, at::zeros({kNumbers})), 2,
               std::vector<c10::Device>(kWindows, FakeDevice().device()));
    return state;
  }

  // Sets all states to those of `step`, after checking that they are those of the previous step.
  void StepThere(OffloadedState& state, int step,
                 const std::function<void(size_t i, Point update)>& updated = nullptr) {
    const size_t copies = CopiesToFakeDevice().size();
    state.ForWindows(
        0, kWindows, [](size_t) { return true; },
        [&](size_t i, size_t last) {
          ASSERT_EQ(last, i + 1);
          if (step > 0) {
            ASSERT_GT(CopiesToFakeDevice().size(), copies + i);
            EXPECT_TRUE(FakeDevice().IsBefore(CopiesToFakeDevice()[copies + i])) << "not there yet";
          }
          for (size_t s = 0; s < 2; ++s) {
            const at::Tensor slot = state.Slot(i, s);
            EXPECT_EQ(slot.device(), FakeDevice().device());
            if (step > 0) {
              EXPECT_EQ(ValuesOf(slot), std::vector<float>(kNumbers, ValueOf(i, s, step - 1)));
            }
            SetValues(slot, ValueOf(i, s, step));
          }
          state.Fill(i);
          if (updated) updated(i, FakeDevice().Operate());
        });
  }

  static void ExpectStep(const OffloadedState& state, int step) {
    OffloadedState::Maps maps;
    for (size_t i = 0; i < kWindows; ++i) {
      for (size_t s = 0; s < 2; ++s) {
        const at::Tensor mapped = state.Mapped(i, s, &maps);
        EXPECT_TRUE(mapped.is_cpu());
        EXPECT_TRUE(mapped.eq(ValueOf(i, s, step)).all().item<bool>()) << i;
      }
    }
  }

  const c10::Stream program_ = FakeDevice().getNewStream(FakeDevice().device(), 0);
  const c10::StreamGuard guard_{program_};
};

TEST_F(OffloadedStateOfADevice, States_AreUpdatedThereAndKeptHere) {
  for (const bool on_disk : {true, false}) {
    const auto state = StateOf(on_disk);
    for (int step = 0; step < 4; ++step) {
      StepThere(*state, step);
      ExpectStep(*state, step);
      EXPECT_EQ(MemoryOfFakeDevice().now, 0);
    }
  }
}

TEST_F(OffloadedStateOfADevice, Step_TakesThreeWindowsAndNoWaitOfTheHost) {
  const auto state = StateOf(false);
  StepThere(*state, 0);
  LimitFakeDevice(-1);
  const size_t in = CopiesToFakeDevice().size(), out = CopiesFromFakeDevice().size();
  const int waits = FakeDevice().host_waits();
  StepThere(*state, 1, [&](size_t i, Point) {
    const auto to = CopiesToFakeDevice(), from = CopiesFromFakeDevice();
    ASSERT_EQ(from.size(), out + i);
    if (i > 0) {
      EXPECT_FALSE(FakeDevice().IsBefore(from[out + i - 1])) << "goes meanwhile";
    }
    if (i > 1 && i + 1 < kWindows) {
      EXPECT_TRUE(FakeDevice().IsBefore(from[out + i - 2])) << "its memory is the next's";
    }
    if (i + 1 == kWindows) return;
    ASSERT_EQ(to.size(), in + i + 2);
    EXPECT_FALSE(FakeDevice().IsBefore(to[in + i + 1])) << "comes meanwhile";
  });
  EXPECT_EQ(FakeDevice().host_waits(), waits);
  EXPECT_EQ(MemoryOfFakeDevice().peak, 3 * kBytes);
  ASSERT_EQ(CopiesFromFakeDevice().size(), out + kWindows);
  EXPECT_EQ(CopiesToFakeDevice().size(), in + kWindows) << "one for each window";
  for (size_t i = 0; i < kWindows; ++i) {
    EXPECT_TRUE(FakeDevice().IsBefore(CopiesFromFakeDevice()[out + i])) << i;
  }
  ExpectStep(*state, 1);
  EXPECT_GT(FakeDevice().host_waits(), waits) << "a save reads what has arrived";
}

TEST_F(OffloadedStateOfADevice, NextWindow_ComesBesideTheUpdate) {
  const auto state = StateOf(false);
  StepThere(*state, 0);
  const size_t in = CopiesToFakeDevice().size();
  StepThere(*state, 1, [&](size_t i, Point update) {
    if (i + 1 == kWindows) return;
    const Point next = CopiesToFakeDevice()[in + i + 1];
    const c10::StreamGuard on(c10::Stream(c10::Stream::UNSAFE, FakeDevice().device(), next.stream));
    EXPECT_FALSE(FakeDevice().IsBefore(update));
  });
}

TEST_F(OffloadedStateOfADevice, RoomForOneWindow_IsEnough) {
  for (const bool on_disk : {true, false}) {
    const auto state = StateOf(on_disk);
    for (int step = 0; step < 3; ++step) {
      LimitFakeDevice(step < 2 ? kBytes : 2 * kBytes);
      StepThere(*state, step);
      ExpectStep(*state, step);
    }
  }
}

TEST_F(OffloadedStateOfADevice, RoomForNone_IsAnErrorThatChangesNothing) {
  const auto state = StateOf(false);
  StepThere(*state, 0);
  LimitFakeDevice(kBytes - 1);
  EXPECT_THAT(ErrorOf([&] { StepThere(*state, 1); }), HasSubstr("has no room for"));
  ExpectStep(*state, 0);
  LimitFakeDevice(-1);
  StepThere(*state, 1);
  ExpectStep(*state, 1);
}

TEST_F(OffloadedStateOfADevice, FirstUpdateThatThrows_LeavesNothingInItsWindow) {
  const auto state = StateOf(false);
  const auto all = [](size_t) { return true; };
  EXPECT_THAT(ErrorOf([&] {
                state->ForWindows(0, kWindows, all, [&](size_t i, size_t) {
                  state->Fill(i);
                  TORCH_CHECK(i == 0, "no kernel");
                });
              }),
              HasSubstr("no kernel"));
  EXPECT_TRUE(state->IsFilled(0));
  EXPECT_FALSE(state->IsFilled(1));
  EXPECT_EQ(MemoryOfFakeDevice().now, 0);
  StepThere(*state, 0);
  ExpectStep(*state, 0);
}

TEST_F(OffloadedStateOfADevice, UpdateThatThrows_LeavesAParameterWithoutStateWithout) {
  OffloadedState state(nullptr, kWindow);
  state.Add(0, std::vector<at::Tensor>(2, at::zeros({8})), 1,
            std::vector<c10::Device>(2, FakeDevice().device()));
  const auto all = [](size_t) { return true; };
  // One window, in which only the first parameter has a gradient.
  state.ForWindows(0, 2, all, [&](size_t first, size_t last) {
    ASSERT_EQ(last - first, 2u);
    SetValues(state.Slot(0, 0), 1);
    state.Fill(0);
  });
  EXPECT_THAT(ErrorOf([&] {
                state.ForWindows(0, 2, all, [&](size_t, size_t) {
                  state.Fill(1);
                  TORCH_CHECK(false, "no kernel");
                });
              }),
              HasSubstr("no kernel"));
  EXPECT_TRUE(state.IsFilled(0));
  EXPECT_FALSE(state.IsFilled(1)) << "what came back of it is no state";
}

TEST_F(OffloadedStateOfADevice, StatesThatAreLoaded_StayHere) {
  for (const bool on_disk : {true, false}) {
    const auto state = StateOf(on_disk);
    StepThere(*state, 0);
    state->Renew();
    const size_t copies = CopiesToFakeDevice().size();
    const int waits = FakeDevice().host_waits();
    state->ForWindows(
        0, kWindows, [](size_t) { return true; },
        [&](size_t i, size_t) {
          EXPECT_GT(FakeDevice().host_waits(), waits) << "the step before writes it yet";
          for (size_t s = 0; s < 2; ++s) state->Slot(i, s).fill_(ValueOf(i, s, 6));
          state->Fill(i);
        },
        OffloadedState::Place::kOnTheHost);
    EXPECT_EQ(CopiesToFakeDevice().size(), copies);
    ExpectStep(*state, 6);
    StepThere(*state, 7);
    ExpectStep(*state, 7);
  }
}

TEST_F(OffloadedStateOfADevice, ParametersOfTwoDevices_HaveWindowsOfTheirOwn) {
  OffloadedState state(nullptr, kWindow);
  state.Add(0, std::vector<at::Tensor>(3, at::zeros({8})), 1,
            {c10::Device(c10::kCPU), FakeDevice().device(), FakeDevice().device()});
  std::vector<std::pair<size_t, size_t>> seen;
  state.ForWindows(
      0, 3, [](size_t) { return true; },
      [&](size_t first, size_t last) {
        EXPECT_EQ(state.Slot(first, 0).is_cpu(), first == 0);
        seen.emplace_back(first, last);
      });
  EXPECT_THAT(seen, ElementsAre(Pair(0, 1), Pair(1, 3)));
}

}  // namespace
}  // namespace muster
