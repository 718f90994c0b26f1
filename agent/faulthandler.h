#ifndef MUSTER_AGENT_FAULTHANDLER_H_
#define MUSTER_AGENT_FAULTHANDLER_H_

#include <sys/types.h>

#include <string>

namespace muster::agent {

// For a Python process whose frames cannot be read from outside: has it print its functions itself,
// if it has registered faulthandler for the signal that its variable MUSTER_STACK_SIGNAL names
// ("USR1" or "USR2"; "SIGUSR1"). No signal is sent to a process that does not handle it, because it
// could end the process. Returns a line for people: where the functions are, or what the program
// needs. Thread-safe; does not wait for the process.
std::string AskFaulthandler(pid_t pid);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_FAULTHANDLER_H_
