#include "worker/parallel/meeting.h"

#include <exception>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/borrowed_comm.h"
#include "worker/collective/test_error.h"
#include "worker/collective/thread_comm.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(MeetAt, OnePlace_GivesTheMessagesOfAllRanks) {
  RunRanks(3, [](Comm& comm) {
    const std::string mine = comm.rank() == 1 ? "" : "line\nof " + std::to_string(comm.rank());
    EXPECT_THAT(MeetAt(comm, "the end of a test", mine),
                ElementsAre("line\nof 0", "", "line\nof 2"));
  });
}

TEST(MeetAt, DifferentPlaces_AreNamedOnEveryRank) {
  std::vector<std::string> errors(3);
  RunRanks(3, [&](Comm& comm) {
    errors[comm.rank()] =
        ErrorOf([&] { MeetAt(comm, comm.rank() == 2 ? "the end" : "the beginning", "x"); });
    // All ranks are in step.
    comm.Barrier();
  });
  EXPECT_THAT(errors, Each(HasSubstr("one is at the beginning, another at the end")));
}

// The failure is the reason why the rank is at another place.
TEST(MeetAt, FailureOfARank_IsNamedWherePlacesDiffer) {
  std::vector<std::string> errors(3);
  RunRanks(3, [&](Comm& comm) {
    const std::string failure = comm.rank() == 1 ? "rank 1 has no\nmemory" : "";
    EXPECT_THAT(MeetAt(comm, "the end", std::to_string(comm.rank()), failure),
                ElementsAre("0", "1", "2"));
    errors[comm.rank()] =
        ErrorOf([&] { MeetAt(comm, comm.rank() == 1 ? "a save" : "the beginning", "x", failure); });
    comm.Barrier();
  });
  EXPECT_THAT(errors, Each(AllOf(HasSubstr("one is at the beginning, another at a save"),
                                 HasSubstr("; before that, rank 1 has no\nmemory"))));
}

TEST(MeetAt, DifferentPlaces_GiveTheMessagesOfAllRanksUnlessOneIsInAnotherExchange) {
  for (const bool others : {false, true}) {
    RunRanks(3, [&](Comm& comm) {
      const int rank = comm.rank();
      if (others && rank == 2) {
        comm.AllGatherBytes("of the program");
        return;
      }
      try {
        MeetAt(comm, rank == 0 ? "the end" : "a save", "line\nof " + std::to_string(rank), "why");
        ADD_FAILURE() << "no error";
      } catch (const RanksApart& apart) {
        EXPECT_TRUE(IsOfRanksApart(std::current_exception()));
        if (others) {
          EXPECT_THAT(apart.messages, testing::IsEmpty());
        } else {
          EXPECT_THAT(apart.messages, ElementsAre("line\nof 0", "line\nof 1", "line\nof 2"));
        }
      }
    });
  }
}

TEST(IsOfRanksApart, OtherErrors_AreNot) {
  EXPECT_FALSE(IsOfRanksApart(std::make_exception_ptr(std::bad_alloc())));
  EXPECT_FALSE(IsOfRanksApart(std::make_exception_ptr(1)));
  EXPECT_TRUE(IsOfRanksApart(std::make_exception_ptr(std::runtime_error(
      "ranks disagree about a collective: rank 0 called Barrier #1; rank 1 called Abort #1"))));
}

TEST(MeetAt, ExchangeOfTheProgram_IsAnotherPlace) {
  std::string error;
  RunRanks(2, [&](Comm& comm) {
    if (comm.rank() == 1) {
      comm.AllGatherBytes("of the program");
      return;
    }
    error = ErrorOf([&] { MeetAt(comm, "the end"); });
  });
  EXPECT_THAT(error, HasSubstr("one is at the end, another at another exchange of the program"));
}

TEST(MeetAt, PlaceThatAnotherOneBeginsWith_IsAnother) {
  std::vector<std::string> errors(2);
  RunRanks(2, [&](Comm& comm) {
    errors[comm.rank()] =
        ErrorOf([&] { MeetAt(comm, comm.rank() == 0 ? "the end" : "the end of a pass"); });
  });
  EXPECT_THAT(errors, Each(HasSubstr("one is at the end, another at the end of a pass;")));
}

TEST(MeetAt, ErrorsThatAreNotLibTorchs_NameThePlace) {
  struct Broken : BorrowedComm {
    using BorrowedComm::BorrowedComm;
    std::vector<std::string> AllGatherBytes(const std::string&) override { throw std::bad_alloc(); }
  };
  RunRanks(1, [](Comm& comm) {
    Broken broken(comm);
    EXPECT_THAT(ErrorOf([&] { MeetAt(broken, "the end"); }),
                AllOf(HasSubstr("bad_alloc"), HasSubstr("meet at the end")));
  });
}

TEST(MeetAt, RankThatIsGone_LeavesThePlaceInTheError) {
  std::string error;
  RunRanks(2, [&](Comm& comm) {
    if (comm.rank() == 1) return;
    error = ErrorOf([&] { MeetAt(comm, "the end"); });
  });
  EXPECT_THAT(error, AllOf(HasSubstr("rank 1"), HasSubstr("meet at the end")));
}

}  // namespace
}  // namespace muster
