#ifndef MUSTER_TRACK_H_
#define MUSTER_TRACK_H_

// Trackers, progress bars, profiles and a logger that knows its rank.
#include "worker/track/logger.h"
#include "worker/track/profile.h"
#include "worker/track/progress.h"
#include "worker/track/tracker.h"

#endif  // MUSTER_TRACK_H_
