#ifndef MUSTER_CLIENT_CLI_MAN_PAGE_H_
#define MUSTER_CLIENT_CLI_MAN_PAGE_H_

#include <string>
#include <vector>

#include "client/cli/command_line.h"

namespace muster::client {

// Returns the name of a command's page: "muster-checkpoints-list".
std::string ManPageName(const CommandSpec& spec);

// Returns the page of one command for man(1), with the content of --help, as troff. Pure.
std::string ManPage(const CommandSpec& spec);

// Returns the page of muster(1), which lists the commands. Pure.
std::string MainManPage(const std::vector<CommandSpec>& commands);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_MAN_PAGE_H_
