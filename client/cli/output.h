#ifndef MUSTER_CLIENT_CLI_OUTPUT_H_
#define MUSTER_CLIENT_CLI_OUTPUT_H_

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

namespace muster::client {

// Rows as columns two blanks apart; the first row is the heading. Foreign text is made printable.
std::string TableText(const std::vector<std::vector<std::string>>& rows);

// JSON as a YAML document that reads as the same value.
std::string YamlText(const nlohmann::ordered_json& value);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_OUTPUT_H_
