#ifndef MUSTER_AGENT_FAULTHANDLER_H_
#define MUSTER_AGENT_FAULTHANDLER_H_

#include <sys/types.h>

#include <string>

namespace muster::agent {

// Of a Python whose frames cannot be read from outside: lets it print its functions itself, if it
// has registered faulthandler for the signal that its variable MUSTER_STACK_SIGNAL names ("USR1" or
// "USR2"; "SIGUSR1"). A process that does not handle that signal gets none: it could end of it.
// Returns a line for people: where the functions are, or what the program needs. Thread-safe; does
// not wait for the process.
std::string AskFaulthandler(pid_t pid);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_FAULTHANDLER_H_
