#ifndef MUSTER_BASE_TEST_KEYS_H_
#define MUSTER_BASE_TEST_KEYS_H_

namespace muster {

// A pair of keys for signatures, from RFC 8032, section 7.1, test 2.
inline constexpr char kTestPrivateKey[] =
    "-----BEGIN PRIVATE KEY-----\n"
    "MC4CAQAwBQYDK2VwBCIEIEzNCJso/5banbbDRuwRTg9bijGfNaumJNqM9u1PuKb7\n"
    "-----END PRIVATE KEY-----\n";
inline constexpr char kTestPublicKey[] =
    "-----BEGIN PUBLIC KEY-----\n"
    "MCowBQYDK2VwAyEAPUAXw+hDiVqStwqnTRt+vJyYLM8uxJaMwM1V8Sr0Zgw=\n"
    "-----END PUBLIC KEY-----\n";
// The public key of another pair, from test 1.
inline constexpr char kOtherTestPublicKey[] =
    "-----BEGIN PUBLIC KEY-----\n"
    "MCowBQYDK2VwAyEA11qYAYKxCrfVS/7TyWQHOg7hcvPapiMlrwIaaPcHURo=\n"
    "-----END PUBLIC KEY-----\n";

}  // namespace muster

#endif  // MUSTER_BASE_TEST_KEYS_H_
