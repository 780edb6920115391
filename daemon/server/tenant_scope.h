// What an administrator may touch beyond its own tenant.
#pragma once

#include "daemon/engine/engine.h"
#include "daemon/server/identity.h"

namespace wavekv {

// The tenant in whose name `caller` inspects, pins or drops `sequence`: its own, or, for an
// administrator, the sequence's. Data (Insert, Query, Attend, Fork ...) stays with its tenant.
TenantId TenantFor(const Engine& engine, const Caller& caller, const SequenceRef& sequence);

}  // namespace wavekv
