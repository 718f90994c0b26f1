#ifndef MUSTER_CLIENT_H_
#define MUSTER_CLIENT_H_

// muster::Client submits jobs to a coordinator and controls them, from any C++ program;
// muster::AsyncClient does the same with callbacks. They need neither torch nor gRPC's headers.
// docs/jobs.md describes jobs.

#include "client/jobs/async_client.h"
#include "client/jobs/job_client.h"
#include "client/jobs/job_types.h"
#include "client/jobs/recovery.h"

#endif  // MUSTER_CLIENT_H_
