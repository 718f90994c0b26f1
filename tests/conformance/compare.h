#ifndef MUSTER_TESTS_CONFORMANCE_COMPARE_H_
#define MUSTER_TESTS_CONFORMANCE_COMPARE_H_

#include <nlohmann/json.hpp>
#include <string>

namespace muster::conformance {

// How far numbers may be apart: |got - want| <= absolute or <= relative * |want|.
struct Tolerance {
  double absolute = 1e-6;
  double relative = 1e-6;
};

// Compares by the rules of tests/testdata/README.md: integers, texts, booleans, null and lists
// exactly; floats within `tolerance`; "nan", "inf", "-inf" stand for those values; the order of
// keys never matters. Returns "" if the values agree, else the place and both values.
std::string Difference(const nlohmann::json& got, const nlohmann::json& want,
                       const Tolerance& tolerance);

}  // namespace muster::conformance

#endif  // MUSTER_TESTS_CONFORMANCE_COMPARE_H_
