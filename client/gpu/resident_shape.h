// What a ResidentModel means to the kernels: shapes and capacities. Pure functions. Internal to the
// SDK.
#pragma once

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/gpu/resident_attachment.h"
#include "client/gpu/resident_batch.h"
#include "gpu/kernels/resolve_head.h"
#include "gpu/kernels/step_layout.h"
#include "gpu/resident/resident_layout.h"

namespace wavekv::client {

// The model with its capacities filled in. InvalidArgument names what cannot be.
absl::StatusOr<ResidentModel> CompleteModel(ResidentModel model);

gpu::StepShape StepShapeOf(const ResidentModel& model);
gpu::ResolveShape ResolveShapeOf(const ResidentModel& model);

// Whether the sequence is of the model's geometry. InvalidArgument.
absl::Status CheckAttachment(const ResidentModel& model, const ResidentAttachment& attachment);

// Whether it is the region that the attachment names, and fits. DataLoss, InvalidArgument.
absl::Status CheckRegion(const ResidentModel& model, const ResidentAttachment& attachment,
                         const resident::ResidentHeader& header);

}  // namespace wavekv::client
